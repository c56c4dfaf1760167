"""How the kernel of `packed_linear.py` is launched. Allocates its output."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.launch_rules import INT8, PLAIN
from dflash_trt.kernels.launching import check_tensor
from dflash_trt.kernels.packed_linear import packed_linear_kernel
from dflash_trt.kernels.packed_matrix import BLOCK_IN, PackedMatrix
from dflash_trt.kernels.packed_product import AS_THEY_ARE, CODES
from dflash_trt.kernels.row_codes_launch import RowCodes

TOKEN_TILES: Final = (16, 32, 64)
FIXED_TOKENS: Final = TOKEN_TILES[-1]  # in place of the smallest tile that holds all rows: a chunk needs the reuse
OUT: Final = 64  # output features of a program: what one warpgroup multiplies at once
SCALED_OUT: Final = 128  # required by Blackwell's block-scaled instruction
NUM_WARPS: Final = 4
NUM_STAGES: Final = 4
WIDENING_STAGES: Final = 2  # packed weights that become float32 fill shared memory


def packed_linear(
    x: Tensor,  # F [N, in]
    matrix: PackedMatrix,
    *,
    has_fixed_tiles: bool = False,  # then a row's bits depend on the row alone, whatever N is
) -> Tensor:  # F [N, out]
    """x @ weight.T + bias, for a weight without an input scale."""
    assert matrix.input_scale is None
    check_tensor("x", x, dtype=x.dtype, shape=[None, matrix.in_size])
    return _launch(x, x, matrix, x.dtype, has_fixed_tiles)


def packed_linear_of_codes(
    x: RowCodes, matrix: PackedMatrix, dtype: torch.dtype, *, has_fixed_tiles: bool = False
) -> Tensor:  # F [N, out]
    """As `packed_linear` for FP8 or NVFP4 activations, quantized with the matrix's input scale.

    All rows share that scale.
    """
    assert matrix.input_scale is not None and matrix.input_scale.numel() == 1
    return _launch(x.values, x.block_scale_argument, matrix, dtype, has_fixed_tiles)


def _launch(
    x: Tensor, x_block_scale: Tensor, matrix: PackedMatrix, dtype: torch.dtype, has_fixed_tiles: bool
) -> Tensor:
    num_rows = len(x)
    out = torch.empty((num_rows, matrix.out_size), dtype=dtype, device=x.device)
    widens_weights = x.dtype == torch.float32 and matrix.form != PLAIN
    tokens = tile_tokens(num_rows, is_fixed=has_fixed_tiles, widens_weights=widens_weights)
    constants = packed_linear_constants(matrix, tokens=tokens)
    packed_linear_kernel[(-(-num_rows // constants["TOKENS"]), -(-matrix.out_size // constants["OUT"]))](
        x,
        x_block_scale,
        matrix.codes_argument,
        matrix.block_scale_argument,
        x if matrix.block_rows is None else matrix.block_rows,
        x if matrix.row_scale is None else matrix.row_scale,
        x if matrix.bias is None else matrix.bias,
        out,
        num_rows,
        matrix.num_block_rows,
        **constants,
        num_warps=NUM_WARPS,
        num_stages=WIDENING_STAGES if widens_weights else NUM_STAGES,
        enable_fp_fusion=True,
    )
    return out


def tile_tokens(num_rows: int, *, is_fixed: bool = False, widens_weights: bool = False) -> int:
    """Rows of a tile: the smallest that holds all, or the largest there is.

    Where packed weights become float32, always the smallest: more do not fit a multiprocessor's shared memory.
    """
    if widens_weights:
        return TOKEN_TILES[0]
    if is_fixed:
        return FIXED_TOKENS
    return next((tile for tile in TOKEN_TILES if tile >= num_rows), TOKEN_TILES[-1])


def packed_linear_constants(matrix: PackedMatrix, *, tokens: int) -> dict[str, int]:
    assert matrix.form != INT8, "int8_linear.py has single layers of integers"
    return {
        "IN": matrix.in_size,
        "OUT_SIZE": matrix.out_size,
        "FORM": matrix.form,
        "INPUT": AS_THEY_ARE if matrix.input_scale is None else CODES,
        "HAS_ROW_SCALE": matrix.row_scale is not None,
        "HAS_BIAS": matrix.bias is not None,
        "TOKENS": tokens,
        "OUT": OUT if matrix.input_scale is None else SCALED_OUT,
        "BLOCK_IN": BLOCK_IN // matrix.codes.itemsize if matrix.form == PLAIN else BLOCK_IN,
    }
