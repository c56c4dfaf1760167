"""Linear layers on a GPU, prepared once at load so that a step reads no scale back to the host.

Plain weights stay as they are. FP8 becomes one FP8 GEMM per run of segments that share their activations, with sums
as the tensor cores keep them. Weights for plain activations stay packed, and a GEMM dequantizes them in registers.
Formats: `formats/base.py`. Works on a CPU too, where PyTorch emulates the FP8 GEMM.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.packed import FORMS, packed_matrix
from dflash_trt.backends.torch.quantized_linear import FP8_GEMM_CAPABILITY, apply_quantized, dequantize
from dflash_trt.formats.base import QuantizedWeight, is_of_experts, row_scale, slice_quantized
from dflash_trt.formats.fp8 import Fp8Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.kernels.packed_linear_launch import packed_linear
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.quantize_fp8_launch import quantize_fp8
from dflash_trt.network.ops import Linear

ACTIVATIONS: Final = (Fp8Weight, Nvfp4Weight)  # classes of weights for which a kernel quantizes activations
WEIGHT_ONLY: Final = tuple(FORMS)  # classes that stay quantized in the GPU's memory under unquantized activations


class Activation(Protocol):
    """Input of a linear layer: unquantized, or as FP8 codes from the kernel that computes it."""

    def value(self) -> Tensor: ...  # F [N, in]

    def codes(self, scale: Tensor) -> Tensor: ...  # float32 [1] -> float8_e4m3fn [N, in]


@dataclass(frozen=True, slots=True)
class Plain:
    """An Activation that is there already."""

    x: Tensor

    def value(self) -> Tensor:
        return self.x

    def codes(self, scale: Tensor) -> Tensor:
        return quantize_fp8(self.x.contiguous(), scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Piece:
    """Consecutive segments with the same input scale. `row_scale` None: all their weight scales are `weight_scale`."""

    codes: Tensor  # float8_e4m3fn [rows, in]
    input_scale: Tensor  # float32 [1]
    weight_scale: Tensor  # float32 [1]
    row_scale: Tensor | None  # float32 [rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFp8Weight(QuantizedWeight[Tensor]):
    pieces: tuple[Fp8Piece, ...]
    dtype: torch.dtype  # of the product


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePackedWeight(QuantizedWeight[Tensor]):
    """Weights that a GEMM dequantizes in registers; each run of segments with the same activations is one."""

    matrices: tuple[PackedMatrix, ...]


def prepare_device_linear(linear: Linear[Tensor], dtype: torch.dtype) -> Linear[Tensor]:
    """The layer as `apply_device_linear` wants it; reads scales back to the host here and never again."""
    weight = linear.weight
    if isinstance(weight, QuantizedWeight) and is_of_experts(weight):
        return linear
    if isinstance(weight, Fp8Weight) and weight.input_scale is not None and _has_fp8_gemm(weight.codes):
        return replace(linear, weight=_fp8_weight(weight, dtype))
    if not isinstance(weight, QuantizedWeight):
        return linear
    if isinstance(weight, Nvfp4Weight) or (type(weight) in FORMS and weight.input_scale is None):
        parts = [packed_matrix(part) for part in _parts_of_one_input(linear, weight)]
        return replace(linear, weight=DevicePackedWeight(segments=weight.segments, matrices=tuple(parts)))
    return replace(linear, weight=dequantize(weight, dtype))


def apply_device_linear(activation: Activation, linear: Linear[Tensor]) -> Tensor:
    """[N, in] -> [N, out], without a word to the host."""
    weight = linear.weight
    if isinstance(weight, DeviceFp8Weight):
        return _apply_fp8(activation, weight, linear.bias)
    x = activation.value()
    if isinstance(weight, DevicePackedWeight):
        outs = [packed_linear(x.contiguous(), matrix) for matrix in weight.matrices]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    if isinstance(weight, QuantizedWeight):
        return apply_quantized(x, linear)
    return F.linear(x, weight, linear.bias)


def _parts_of_one_input(linear: Linear[Tensor], weight: QuantizedWeight[Tensor]) -> Iterator[Linear[Tensor]]:
    """The layer in runs of segments whose activations are quantized with the same scale."""
    scales = [None] * len(weight.segments) if weight.input_scale is None else weight.input_scale.tolist()
    start = 0
    for _, group in groupby(zip(scales, weight.segments, strict=True), key=lambda segment: segment[0]):
        stop = start + sum(rows for _, rows in group)
        part = slice_quantized(weight, start, stop, lambda tensor, first, end: tensor[first:end])
        yield Linear(weight=part, bias=None if linear.bias is None else linear.bias[start:stop])
        start = stop


def _has_fp8_gemm(codes: Tensor) -> bool:
    if codes.shape[0] % 16 or codes.shape[1] % 16:
        return False  # cuBLASLt's alignment
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= FP8_GEMM_CAPABILITY


def _fp8_weight(weight: Fp8Weight[Tensor], dtype: torch.dtype) -> DeviceFp8Weight:
    assert weight.input_scale is not None
    input_scales = cast("list[float]", weight.input_scale.tolist())
    weight_scales = cast("list[float]", weight.weight_scale.tolist())
    rows = row_scale(weight)
    pieces, start = [], 0
    segments = zip(input_scales, weight_scales, weight.segments, strict=True)
    for input_scale, group in groupby(segments, key=lambda segment: segment[0]):
        members = list(group)
        stop = start + sum(size for _, _, size in members)
        scales = {scale for _, scale, _ in members}
        pieces.append(
            Fp8Piece(
                codes=weight.codes[start:stop],
                input_scale=rows.new_tensor([input_scale]),
                weight_scale=rows.new_tensor([scales.pop() if len(scales) == 1 else 1.0]),
                row_scale=rows[start:stop] if len({scale for _, scale, _ in members}) > 1 else None,
            )
        )
        start = stop
    return DeviceFp8Weight(segments=weight.segments, input_scale=weight.input_scale, pieces=tuple(pieces), dtype=dtype)


def _apply_fp8(activation: Activation, weight: DeviceFp8Weight, bias: Tensor | None) -> Tensor:
    outs = []
    for piece in weight.pieces:
        out = torch._scaled_mm(
            activation.codes(piece.input_scale),
            piece.codes.t(),
            scale_a=piece.input_scale,
            scale_b=piece.weight_scale,
            out_dtype=weight.dtype,
            use_fast_accum=True,
        )
        outs.append(out if piece.row_scale is None else out.mul_(piece.row_scale))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    return out if bias is None else out.add_(bias)
