"""NVFP4 layers with NVFP4 activations (W4A4) in the layout of PyTorch's block-scaled GEMM (cuBLAS).

The kernel of `packed_linear.py` covers sizes, dtypes and PyTorch releases that it does not support.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.kernels.compiling import active_architecture
from dflash_trt.kernels.row_codes_launch import TILE_BLOCKS, TILE_ROWS, RowCodes
from dflash_trt.network.ops import Linear

FP4_GEMM_CAPABILITY = (10, 0)  # CUDA's: FP4 tensor cores from here on
_OUT_GRAIN = 16  # PyTorch's demand on `out`


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaledMatrix:
    """One NVFP4 matrix with one scale for all rows, and one for all activations."""

    codes: Tensor  # float4_e2m1fn_x2 [in / 2, out], a view of the weight's
    block_scale: Tensor  # float8_e4m3fn, tiled: see `row_codes.scale_offsets`
    weight_scale: Tensor  # float32 [1]
    input_scale: Tensor  # float32 [1]
    bias: Tensor | None  # F [out]


def has_fp4_gemm(device: torch.device) -> bool:
    """PyTorch has it since 2.10."""
    if device.type == "cpu" or not hasattr(F, "scaled_mm"):
        return False
    return divmod(active_architecture(), 10) >= FP4_GEMM_CAPABILITY


def block_scaled_matrix(linear: Linear[Tensor]) -> BlockScaledMatrix | None:
    """A layer with one input scale for all segments, prepared at load.

    None if the GEMM does not support it. Reads scales back to the host.
    """
    weight = linear.weight
    if not isinstance(weight, Nvfp4Weight) or weight.input_scale is None or not _takes(weight):
        return None
    return BlockScaledMatrix(
        codes=weight.codes.contiguous().view(torch.float4_e2m1fn_x2).t(),
        block_scale=tiled(weight.block_scale),
        weight_scale=weight.weight_scale[:1].clone(),
        input_scale=weight.input_scale[:1].clone(),
        bias=linear.bias,
    )


def block_scaled_linear(x: RowCodes, matrix: BlockScaledMatrix, dtype: torch.dtype) -> Tensor:  # -> [N, out]
    """x @ weight.T + bias of codes made with the matrix's input scale.

    PyTorch multiplies the two scales and copies the product to where cuBLAS reads it: two launches of one thread.
    """
    assert x.block_scale is not None
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    has_bias_inside = matrix.bias is not None and dtype != torch.float32  # cuBLAS adds no float32
    out = F.scaled_mm(
        x.values.view(torch.float4_e2m1fn_x2),
        matrix.codes,
        scale_a=[x.block_scale, matrix.input_scale],
        scale_recipe_a=recipe,
        swizzle_a=swizzle,
        scale_b=[matrix.block_scale, matrix.weight_scale],
        scale_recipe_b=recipe,
        swizzle_b=swizzle,
        bias=matrix.bias if has_bias_inside else None,
        output_dtype=dtype,
    )
    return out if matrix.bias is None or has_bias_inside else out.add_(matrix.bias)


def tiled(block_scale: Tensor) -> Tensor:  # [out, in / 16] -> the same scales, flat
    """Block scales in cuBLAS's layout, tiles of 128 rows x 4 blocks; scales of missing rows are 0."""
    rows, num_blocks = block_scale.shape
    missing = -rows % TILE_ROWS
    whole = F.pad(block_scale.view(torch.uint8), (0, 0, 0, missing))
    tiles = whole.view(-1, 4, TILE_ROWS // 4, num_blocks // TILE_BLOCKS, TILE_BLOCKS)  # rows: [tile, quarter, 32]
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e4m3fn)


def _takes(weight: QuantizedWeight[Tensor]) -> bool:
    assert isinstance(weight, Nvfp4Weight)
    out_size, num_blocks = weight.block_scale.shape
    scales = weight.weight_scale.cpu()
    has_one_scale = bool((scales == scales[0]).all())
    is_whole = out_size % _OUT_GRAIN == 0 and num_blocks % TILE_BLOCKS == 0
    return has_fp4_gemm(weight.codes.device) and is_whole and has_one_scale
