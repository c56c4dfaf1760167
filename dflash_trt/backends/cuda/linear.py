"""Linear layers on a GPU, prepared once at load so that a step reads no scale back to the host.

Plain weights stay as they are. Others stay packed, one GEMM per run of segments that share their activations: FP8 in
PyTorch's FP8 GEMM, with sums as the tensor cores keep them, NVFP4 with quantized activations in its block-scaled GEMM,
INT8 in a kernel of ours with exact sums, the rest, and sizes that those do not take, in another one. Formats:
`formats/base.py`. Works on a CPU too, where PyTorch emulates the FP8 GEMM.

A GEMM of PyTorch's chooses its kernel, and with it the order of a sum, by the number of rows. Layers with fixed tiles
are all computed in our kernel.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.nvfp4 import BlockScaledMatrix, block_scaled_linear, block_scaled_matrix
from dflash_trt.backends.cuda.packed import FORMS, dense, packed_matrix, parts_of_one_input
from dflash_trt.formats.base import QuantizedWeight, is_of_experts, row_scale, runs_of_one_input
from dflash_trt.formats.fp8 import Fp8Weight
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.kernels import launch_rules, row_codes
from dflash_trt.kernels.int8_linear_launch import Int8Matrix, int8_linear
from dflash_trt.kernels.packed_linear_launch import packed_linear, packed_linear_of_codes
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.row_codes_launch import RowCodes, quantize_rows
from dflash_trt.network.ops import Linear

ACTIVATIONS: Final = (Fp8Weight, Int8Weight, Nvfp4Weight)  # classes of weights for which a kernel quantizes activations
# Classes that stay quantized in the GPU's memory under unquantized activations.
WEIGHT_ONLY: Final = tuple(kind for kind in FORMS if kind is not Int8Weight)
_FP8_GEMM_CAPABILITY: Final = (8, 9)  # CUDA's: FP8 tensor cores from here on


class Activation(Protocol):
    """Input of a linear layer: unquantized, or as codes from the kernel that computes it."""

    def value(self) -> Tensor: ...  # F [N, in]

    def codes(self, form: int, scale: Tensor) -> RowCodes: ...  # RESULT of `row_codes.py`, float32 [1]


@dataclass(frozen=True, slots=True)
class Plain:
    """An Activation that is there already."""

    x: Tensor

    def value(self) -> Tensor:
        return self.x

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        return quantize_rows(self.x.contiguous(), form, scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Piece:
    """Consecutive segments with one input scale.

    `weight_scale` is the weight scale of all if `row_scale` is None.
    """

    codes: Tensor  # float8_e4m3fn [rows, in]
    input_scale: Tensor  # float32 [1]
    weight_scale: Tensor  # float32 [1]
    row_scale: Tensor | None  # float32 [rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFp8Weight(QuantizedWeight[Tensor]):
    pieces: tuple[Fp8Piece, ...]
    dtype: torch.dtype  # the product's dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceInt8Weight(QuantizedWeight[Tensor]):
    """Any tile gives the same bits."""

    matrix: Int8Matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePackedWeight(QuantizedWeight[Tensor]):
    """Weights as a GEMM reads them; each run of segments with the same activations is one."""

    matrices: tuple[PackedMatrix | BlockScaledMatrix, ...]
    dtype: torch.dtype  # the product's dtype
    has_fixed_tiles: bool = False


def prepare_device_linear(linear: Linear[Tensor], dtype: torch.dtype) -> Linear[Tensor]:
    """The layer as `apply_device_linear` wants it; reads scales back to the host here and never again."""
    weight = linear.weight
    if not isinstance(weight, QuantizedWeight) or is_of_experts(weight):
        return linear
    if isinstance(weight, Int8Weight):
        return _int8_linear(linear, weight)
    if isinstance(weight, Fp8Weight) and weight.input_scale is not None and _has_fp8_gemm(weight.codes):
        return replace(linear, weight=_fp8_weight(weight, dtype))
    parts = parts_of_one_input(linear, weight)
    matrices = tuple(block_scaled_matrix(part) or packed_matrix(part) for part in parts)
    return replace(linear, weight=DevicePackedWeight(segments=weight.segments, matrices=matrices, dtype=dtype))


def prepare_fixed_linear(linear: Linear[Tensor], dtype: torch.dtype) -> Linear[Tensor]:
    """The layer with fixed tiles: a row's bits depend on the row only, quantized or not."""
    weight = linear.weight
    if not isinstance(weight, QuantizedWeight):
        prepared = DevicePackedWeight(
            segments=(len(weight),), matrices=(packed_matrix(linear),), dtype=dtype, has_fixed_tiles=True
        )
    elif is_of_experts(weight):
        return linear
    elif isinstance(weight, Int8Weight):
        return _int8_linear(linear, weight)
    else:
        matrices = tuple(packed_matrix(part) for part in parts_of_one_input(linear, weight))
        prepared = DevicePackedWeight(segments=weight.segments, matrices=matrices, dtype=dtype, has_fixed_tiles=True)
    return replace(linear, weight=prepared)


def apply_device_linear(activation: Activation, linear: Linear[Tensor]) -> Tensor:
    """[N, in] -> [N, out], without a word to the host."""
    weight = linear.weight
    if isinstance(weight, DeviceInt8Weight):
        return int8_linear(activation.value().contiguous(), weight.matrix)
    if isinstance(weight, DeviceFp8Weight):
        return _apply_fp8(activation, weight, linear.bias)
    if isinstance(weight, DevicePackedWeight):
        outs = [_apply_matrix(activation, matrix, weight) for matrix in weight.matrices]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    assert not isinstance(weight, QuantizedWeight)
    return F.linear(activation.value(), weight, linear.bias)


def _apply_matrix(
    activation: Activation, matrix: PackedMatrix | BlockScaledMatrix, weight: DevicePackedWeight
) -> Tensor:
    is_fixed, dtype = weight.has_fixed_tiles, weight.dtype
    if isinstance(matrix, BlockScaledMatrix):
        codes = activation.codes(row_codes.NVFP4_TILED, matrix.input_scale)
        return block_scaled_linear(codes, matrix, dtype)
    if matrix.input_scale is None:
        return packed_linear(activation.value().contiguous(), matrix, has_fixed_tiles=is_fixed)
    form = row_codes.FP8 if matrix.form == launch_rules.FP8 else row_codes.NVFP4
    return packed_linear_of_codes(activation.codes(form, matrix.input_scale), matrix, dtype, has_fixed_tiles=is_fixed)


def _has_fp8_gemm(codes: Tensor) -> bool:
    if codes.shape[0] % 16 or codes.shape[1] % 16:
        return False  # cuBLASLt's alignment
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= _FP8_GEMM_CAPABILITY


def _int8_linear(linear: Linear[Tensor], weight: Int8Weight[Tensor]) -> Linear[Tensor]:
    matrix = Int8Matrix(
        codes=dense(weight.codes),
        weight_scale=dense(weight.weight_scale),
        bias=None if linear.bias is None else dense(linear.bias),
    )
    matrix.check()
    return replace(linear, weight=DeviceInt8Weight(segments=weight.segments, matrix=matrix))


def _fp8_weight(weight: Fp8Weight[Tensor], dtype: torch.dtype) -> DeviceFp8Weight:
    rows, pieces = row_scale(weight), []
    for input_scale, start, stop in runs_of_one_input(weight):
        scale, *others = torch.unique(rows[start:stop]).tolist()
        pieces.append(
            Fp8Piece(
                codes=weight.codes[start:stop],
                input_scale=rows.new_tensor([input_scale]),
                weight_scale=rows.new_tensor([1.0 if others else scale]),
                row_scale=rows[start:stop] if others else None,
            )
        )
    return DeviceFp8Weight(segments=weight.segments, input_scale=weight.input_scale, pieces=tuple(pieces), dtype=dtype)


def _apply_fp8(activation: Activation, weight: DeviceFp8Weight, bias: Tensor | None) -> Tensor:
    outs = []
    for piece in weight.pieces:
        out = torch._scaled_mm(
            activation.codes(row_codes.FP8, piece.input_scale).values,
            piece.codes.t(),
            scale_a=piece.input_scale,
            scale_b=piece.weight_scale,
            out_dtype=weight.dtype,
            use_fast_accum=True,
        )
        outs.append(out if piece.row_scale is None else out.mul_(piece.row_scale))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    return out if bias is None else out.add_(bias)
