"""How the kernel of `packed_linear.py` is launched. Allocates its output, and codes of activations."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.packed_linear import packed_linear_kernel
from dflash_trt.kernels.packed_matrix import BLOCK_IN, PackedMatrix
from dflash_trt.kernels.packed_product import AS_THEY_ARE, CODES, NVFP4
from dflash_trt.kernels.quantize_nvfp4_launch import quantize_nvfp4
from dflash_trt.kernels.tensor_checks import check_tensor

TOKEN_TILES: Final = (16, 32, 64)
OUT: Final = 64  # output features of a program: what one warpgroup multiplies at once
SCALED_OUT: Final = 128  # what Blackwell's block-scaled instruction takes
NUM_WARPS: Final = 4
NUM_STAGES: Final = 4


def packed_linear(x: Tensor, matrix: PackedMatrix) -> Tensor:  # F [N, in] -> [N, out]
    """x @ weight.T + bias. With an input scale, which is one for all rows, x is quantized to NVFP4 before."""
    check_tensor("x", x, dtype=x.dtype, shape=[None, matrix.in_size])
    num_rows = len(x)
    out = torch.empty((num_rows, matrix.out_size), dtype=x.dtype, device=x.device)
    x_block_scale = x
    if matrix.input_scale is not None:
        assert matrix.form == NVFP4 and matrix.input_scale.numel() == 1
        x, x_block_scale = quantize_nvfp4(x, matrix.input_scale)
    constants = packed_linear_constants(matrix, num_rows=num_rows)
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
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )
    return out


def packed_linear_constants(matrix: PackedMatrix, *, num_rows: int) -> dict[str, int]:
    return {
        "IN": matrix.in_size,
        "OUT_SIZE": matrix.out_size,
        "FORM": matrix.form,
        "INPUT": AS_THEY_ARE if matrix.input_scale is None else CODES,
        "HAS_ROW_SCALE": matrix.row_scale is not None,
        "HAS_BIAS": matrix.bias is not None,
        "TOKENS": next((tile for tile in TOKEN_TILES if tile >= num_rows), TOKEN_TILES[-1]),
        "OUT": OUT if matrix.input_scale is None else SCALED_OUT,
        "BLOCK_IN": BLOCK_IN,
    }
