"""Linear layers on a CPU: weights laid out once, at load, so that a step streams few bytes.

A step of a few rows waits for its weights. Float32 weights that 16 bits hold exactly, such as from a bfloat16
checkpoint or quantized codes, are kept in float16, scaled by a power of two, and multiplied in float32: the same
products from half the memory. Other weights are reordered for oneDNN, which makes a verify block cheap
(docs/benchmarks.md).
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.native.library import CpuKernels
from dflash_trt.backends.torch.native.linear import NativeLinear, panel_linear
from dflash_trt.network.ops import Linear

_FLOAT16_MAX: Final = torch.finfo(torch.float16).max
# Packing takes tens of seconds per billion weights, and in larger layers long prompts are slower than in oneDNN's.
_MAX_HALF_WEIGHTS: Final = 1 << 22
_MAX_EXPONENT: Final = 126  # its negative is a normal float32, too
_ROWS_AT_ONCE: Final = 64  # to stay in the CPU's cache


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfLinear(Linear[Tensor]):
    """A float32 layer whose weight is stored in float16; `weight` is on the meta device, for its shape."""

    packed: Any  # weight / scale in FBGEMM's layout
    scale: float  # a power of two, of what comes out


def pack_for_cpu(
    linear: Linear[Tensor], kernels: CpuKernels | None = None, *, rounds_inputs: bool = False
) -> Linear[Tensor]:
    """The same layer in the fastest layout that changes no product; unchanged where there is none.

    With `rounds_inputs` activations may be rounded to bfloat16 where that is faster.
    """
    weight = linear.weight
    assert isinstance(weight, Tensor), "quantized weights have a file of their own"
    if weight.device.type != "cpu":
        return linear
    if kernels is not None and (panels := panel_linear(linear, kernels, rounds_inputs=rounds_inputs)):
        return panels
    if weight.dtype == torch.float32 and (half := _half_linear(linear, weight)) is not None:
        return half
    if not _can_reorder(weight.dtype):
        return linear
    return Linear(weight=torch.ops.mkldnn._reorder_linear_weight(weight), bias=linear.bias)


def apply_linear(x: Tensor, linear: Linear[Tensor]) -> Tensor:
    """x @ weight.T + bias, whichever layout the weight has."""
    out: Tensor
    if isinstance(linear, NativeLinear):
        return linear(x)
    if isinstance(linear, HalfLinear):
        # The operator of the packet, whose checks of a packed argument cost more than a small GEMM.
        out = torch.ops.quantized.linear_dynamic_fp16._op(x, linear.packed)
        if linear.scale != 1.0:
            out.mul_(linear.scale)
        return out if linear.bias is None else out.add_(linear.bias)
    weight = linear.weight
    assert isinstance(weight, Tensor), "quantized weights have a file of their own"
    if weight.is_mkldnn:
        out = torch.ops.mkldnn._linear_pointwise(x, weight, linear.bias, "none", [], "")
        return out
    return F.linear(x, weight, linear.bias)


def _half_linear(linear: Linear[Tensor], weight: Tensor) -> HalfLinear | None:
    """None for a large layer, and where float16 cannot hold every weight, however the layer is scaled."""
    has_kernel = "fbgemm" in torch.backends.quantized.supported_engines
    if not has_kernel or not 0 < weight.numel() <= _MAX_HALF_WEIGHTS:
        return None
    largest = weight.abs().max().item()
    if not math.isfinite(largest):
        return None
    exponent = min(math.floor(math.log2(_FLOAT16_MAX / largest)), _MAX_EXPONENT) if largest else 0
    scaled, scale = weight * 2.0**exponent, 2.0**-exponent
    parts = zip(torch.split(scaled, _ROWS_AT_ONCE), torch.split(weight, _ROWS_AT_ONCE), strict=True)
    if not all(torch.equal(part.half().float().mul_(scale), rows) for part, rows in parts):
        return None
    return HalfLinear(
        weight=weight.to("meta"),
        bias=linear.bias,
        packed=torch.ops.quantized.linear_prepack_fp16(scaled, None),
        scale=scale,
    )


def _can_reorder(dtype: torch.dtype) -> bool:
    is_available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
