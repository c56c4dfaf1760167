"""Rows as the next GEMM reads them: unchanged, as FP8 codes, or as NVFP4 codes with block scales.

For the kernels that compute activations a row at a time. `formats/fp8.py` and `formats/nvfp4.py` define the codes.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.quantize_fp8 import e4m3
from dflash_trt.kernels.quantize_nvfp4 import nvfp4

# RESULT. NVFP4_TILED has its block scales where cuBLAS reads them: see `scale_offsets`.
AS_THEY_ARE, FP8, NVFP4, NVFP4_TILED = range(4)

_AS_THEY_ARE, _FP8, _NVFP4_TILED = tl.constexpr(AS_THEY_ARE), tl.constexpr(FP8), tl.constexpr(NVFP4_TILED)


@triton.jit
def quantize_rows_kernel(
    x,  # F [N, num_columns]
    result,  # out, codes [N, num_columns]
    block_scale,  # out; see `store_row`
    scale,  # float32 [1]
    num_columns,
    BLOCK: tl.constexpr,
    RESULT: tl.constexpr,
):
    """Grid: (N, ceil(num_columns / BLOCK))."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * num_columns + columns, mask=columns < num_columns, other=0.0)
    store_row(result, block_scale, scale, value, row, first, num_columns, BLOCK, RESULT)


@triton.jit
def store_row(
    result,  # out, F [N, num_columns], or codes: float8_e4m3fn, or uint8 [N, num_columns / 2]
    block_scale,  # out, float8_e4m3fn; written only with NVFP4 codes
    scale,  # float32 [1]; read only for codes
    value,  # F [BLOCK]: columns of `row` from `first` on, rounded as if they had been stored
    row,  # int64
    first,  # a multiple of BLOCK
    num_columns,
    BLOCK: tl.constexpr,
    RESULT: tl.constexpr,
):
    columns = first + tl.arange(0, BLOCK)
    if RESULT == _AS_THEY_ARE:
        tl.store(result + row * num_columns + columns, value, mask=columns < num_columns)
    elif RESULT == _FP8:
        codes = e4m3(value.to(tl.float32), tl.load(scale)).to(result.dtype.element_ty)
        tl.store(result + row * num_columns + columns, codes, mask=columns < num_columns)
    else:
        codes, scales = nvfp4(value.to(tl.float32)[None, :], tl.load(scale), 1, BLOCK)
        num_pairs, num_blocks = num_columns // 2, num_columns // 16
        pairs, blocks = first // 2 + tl.arange(0, BLOCK // 2), first // 16 + tl.arange(0, BLOCK // 16)
        tl.store(result + (row * num_pairs + pairs)[None, :], codes, mask=(pairs < num_pairs)[None, :])
        at = scale_offsets(row, blocks, num_blocks, RESULT == _NVFP4_TILED)
        tl.store(block_scale + at[None, :], scales.to(tl.float8e4nv), mask=(blocks < num_blocks)[None, :])


@triton.jit
def scale_offsets(row, blocks, num_blocks, IS_TILED: tl.constexpr):
    """Offsets of block scales: row by row, or in tiles of 128 rows x 4 blocks, row after row of tiles.

    A tile is [32, 4, 4]: rows r, r + 32, r + 64 and r + 96 side by side, 4 blocks each. `num_blocks` is a multiple of
    4 then. See "1D block scaling factors layout" in the documentation of cuBLAS.
    """
    if IS_TILED:
        tile = (row // 128) * (num_blocks // 4) + blocks // 4
        return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + blocks % 4
    else:
        return row * num_blocks + blocks
