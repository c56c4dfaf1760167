"""Linear layers on a CPU: weights reordered once for oneDNN, which is what makes a verify block cheap.

A verify block has K+1 rows. PyTorch's default float32 path costs several times a single row there; oneDNN with a
weight laid out in advance costs little more than one row, in float32 and in bfloat16 (docs/benchmarks.md).
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.network.ops import Linear


def pack_for_cpu(linear: Linear[Tensor]) -> Linear[Tensor]:
    """The same layer with its weight in oneDNN's blocked layout; unchanged where oneDNN cannot serve it."""
    weight = linear.weight
    assert isinstance(weight, Tensor), "quantized weights have a file of their own"
    if weight.device.type != "cpu" or not _can_quantize(weight.dtype):
        return linear
    return Linear(weight=torch.ops.mkldnn._reorder_linear_weight(weight), bias=linear.bias)


def apply_linear(x: Tensor, linear: Linear[Tensor]) -> Tensor:
    """x @ weight.T + bias, whichever layout the weight has."""
    weight = linear.weight
    assert isinstance(weight, Tensor), "quantized weights have a file of their own"
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, linear.bias, "none", [], "")
        return out
    return F.linear(x, weight, linear.bias)


def _can_quantize(dtype: torch.dtype) -> bool:
    is_available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not is_available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
