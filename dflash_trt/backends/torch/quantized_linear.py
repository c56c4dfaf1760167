"""Quantized linear layers in PyTorch on a CPU, exact.

They multiply the codes themselves, which every compute dtype holds without rounding, and apply the
scales to the product: what the GPU formats do, up to the order of the sum. Block scales are in the operand, each
product rounded once where they are no powers of two. Formats: `formats/base.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.backends.torch.int8_linear import apply_int8
from dflash_trt.backends.torch.linear import apply_linear, pack_for_cpu
from dflash_trt.backends.torch.native.four_bits import four_bit_linear
from dflash_trt.backends.torch.native.library import CpuKernels
from dflash_trt.backends.torch.native.linear import integer_linear
from dflash_trt.formats.base import QuantizedWeight, is_of_experts, row_scale, runs_of_one_input
from dflash_trt.formats.fp8 import Fp8Weight, e4m3
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.nvfp4 import BLOCK_SIZE, Nvfp4Weight, block_scales, e2m1_codes, e2m1_values
from dflash_trt.formats.registry import format_of
from dflash_trt.network.ops import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive segments that see the same activations: one GEMM."""

    linear: Linear[Tensor]  # [rows, in], the codes (times their block scales) in the compute dtype; no bias
    scale: Tensor | None  # float32 [rows]: weight_scale * input_scale
    input_scale: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DequantizedWeight(QuantizedWeight[Tensor]):
    """A quantized weight prepared for unquantized GEMMs."""

    pieces: tuple[Piece, ...]
    quantize: "QuantizeActivations | None"  # None for a weight-only format


def dequantize(
    weight: QuantizedWeight[Tensor],
    dtype: torch.dtype,
    *,
    is_kept: bool = True,
    operands: torch.dtype | None = None,
    **packing: Any,  # see `pack_for_cpu`
) -> DequantizedWeight:
    """Codes times their block scales, in `dtype` (float32 or bfloat16; float16 lacks their range).

    They are rounded to `operands` (default: `dtype`). With `is_kept`, for many calls, they are laid out for the CPU,
    which takes time.
    """
    assert dtype in (torch.float32, torch.bfloat16), f"quantized weights do not compute in {dtype}"
    values = format_of(weight).unscaled(weight, operands or dtype).to(dtype)
    scales = None if weight.weight_scale is None else row_scale(weight)
    pieces = []
    for input_scale, start, stop in runs_of_one_input(weight):
        scale = None if scales is None else scales[start:stop] * (1.0 if input_scale is None else input_scale)
        linear = Linear(weight=values[start:stop])
        linear = pack_for_cpu(linear, **packing) if is_kept else linear
        pieces.append(Piece(linear=linear, scale=scale, input_scale=input_scale))
    return DequantizedWeight(
        segments=weight.segments,
        input_scale=weight.input_scale,
        pieces=tuple(pieces),
        quantize=None if weight.input_scale is None else ACTIVATIONS[type(weight)],
    )


def prepare_linear(
    linear: Linear[Tensor],
    dtype: torch.dtype,
    *,
    kernels: CpuKernels | None = None,
    rounds_inputs: bool = False,  # see `pack_for_cpu`
    operands: torch.dtype | None = None,  # see `dequantize`
) -> Linear[Tensor]:
    """The layer in the form a CPU computes with, once, at load.

    It has exact codes in `dtype`, and weights that are stored in fewer bits are widened to it. Codes of INT8, and
    quantized experts, stay as they are.
    """
    weight = linear.weight
    if isinstance(weight, Tensor):
        is_narrow = dtype == torch.float32 and weight.dtype != dtype
        wide = replace(linear, weight=weight.float()) if is_narrow else linear
        return pack_for_cpu(wide, kernels, rounds_inputs=rounds_inputs)
    if is_of_experts(weight):
        return linear
    if kernels is not None and dtype == torch.float32:
        packed = integer_linear(linear, kernels) or four_bit_linear(linear, kernels, rounds_inputs=rounds_inputs)
        if packed is not None:
            return packed
    if isinstance(weight, Int8Weight):
        return linear
    values = dequantize(weight, dtype, operands=operands, kernels=kernels, rounds_inputs=rounds_inputs)
    return replace(linear, weight=values)


def apply_quantized(x: Tensor, linear: Linear[Tensor]) -> Tensor:
    """x [N, in] -> [N, out] in x's dtype; see `formats/base.py` for what it computes."""
    weight = linear.weight
    if isinstance(weight, Int8Weight):
        return apply_int8(x, weight, linear.bias)
    assert isinstance(weight, DequantizedWeight)
    outs = [_apply_piece(x, piece, weight.quantize) for piece in weight.pieces]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    return out if linear.bias is None else out + linear.bias


def quantized_fp8(x: Tensor, input_scale: float) -> Tensor:  # float8_e4m3fn
    """x / input_scale, rounded; in float32 whatever x is."""
    return e4m3(x.float() / input_scale)


def quantized_nvfp4(x: Tensor, input_scale: float) -> Tensor:  # float32, x's shape
    """E2M1 values times their E4M3 block scales; `input_scale` is still to be multiplied in."""
    blocks = x.float().view(*x.shape[:-1], -1, BLOCK_SIZE)
    scale = block_scales(blocks, torch.tensor(input_scale, device=x.device)).float()[..., None]
    codes = e2m1_codes(blocks / (scale * input_scale))
    quantized = codes[..., 0::2] | codes[..., 1::2] << 4
    return (e2m1_values(quantized) * scale).view(x.shape)


# By class of weight. A weight-only format needs no row: `unscaled` and `row_scale` say all of its arithmetic.
QuantizeActivations = Callable[[Tensor, float], Tensor]  # (x, input_scale) -> x / input_scale, rounded
ACTIVATIONS: Final[dict[type[QuantizedWeight[Any]], QuantizeActivations]] = {
    Fp8Weight: quantized_fp8,
    Nvfp4Weight: quantized_nvfp4,
}


def _apply_piece(x: Tensor, piece: Piece, quantize: QuantizeActivations | None) -> Tensor:
    x_dtype = x.dtype
    if piece.input_scale is not None and quantize is not None:
        x = quantize(x, piece.input_scale).to(x_dtype)  # exact: few significant bits
    product = apply_linear(x, piece.linear)
    return product if piece.scale is None else (product * piece.scale).to(x_dtype)  # the scales in float32
