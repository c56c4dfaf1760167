"""Rows as the next GEMM reads them: unchanged, as FP8 codes, or as NVFP4 codes with block scales.

For the kernels that compute activations a row at a time. `formats/fp8.py` and `formats/nvfp4.py` define the codes.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

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


_E2M1_MAX = tl.constexpr(6.0)
_MIN_BLOCK_SCALE = tl.constexpr(2.0**-9)
_BLOCK = tl.constexpr(16)


@triton.jit
def nvfp4(value, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [ROWS, COLUMNS], float32 -> codes uint8 [ROWS, COLUMNS / 2], float32 block scales.

    The block scales [ROWS, COLUMNS / 16] are numbers of E4M3.
    """
    blocks = tl.reshape(value, (ROWS, COLUMNS // _BLOCK, _BLOCK))
    largest = tl.max(tl.abs(blocks), axis=2)
    wanted = tl.div_rn(largest, _E2M1_MAX * scale + tl.zeros_like(largest))
    wanted = tl.where(wanted == 0.0, 1.0, tl.maximum(wanted, _MIN_BLOCK_SCALE))
    block_scale = round_e4m3(wanted)
    divisor = block_scale * scale
    scaled = quotient(blocks, divisor[:, :, None], tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)[:, :, None])
    pairs = tl.reshape(_e2m1(scaled), (ROWS, COLUMNS // 2, 2))
    low, high = tl.split(pairs)
    return (low | (high << 4)).to(tl.uint8), block_scale


@triton.jit
def _e2m1(value):
    """To nearest, ties to the even code; saturates."""
    size = tl.abs(value)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return tl.where(value < 0.0, code + 8, code)


_E4M3_MAX = tl.constexpr(448.0)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_SUBNORMAL_ROUNDER = tl.constexpr(1.5 * 2.0**14)  # adding it leaves multiples of 2^-9, E4M3's smallest step


@triton.jit
def quantize_fp8_kernel(
    x,  # F [num_elements]
    scale,  # float32 [1]
    codes,  # float8_e4m3fn [num_elements]
    num_elements,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < num_elements, other=0.0).to(tl.float32)
    tl.store(codes + at, e4m3(value, tl.load(scale)).to(codes.dtype.element_ty), mask=at < num_elements)


@triton.jit
def e4m3(value, scale):
    """value / scale as E4M3 has it, still in float32."""
    return round_e4m3(tl.div_rn(value, scale + tl.zeros_like(value)))


@triton.jit
def fp8(value, scale, inverse):
    """value / scale in E4M3, with `inverse` = 1 / scale: for kernels that quantize as they go."""
    value = quotient(value, scale, inverse)
    return tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX).to(tl.float8e4nv)


@triton.jit
def quotient(value, scale, inverse):
    """value / scale, correctly rounded if `inverse` is (Markstein), in three instructions, not thirty."""
    guess = value * inverse
    return tl.fma(tl.fma(-guess, scale + tl.zeros_like(value), value), inverse + tl.zeros_like(value), guess)


@triton.jit
def round_e4m3(value):
    """To nearest even, saturating, still in float32."""
    value = tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX)
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # 3 bits of mantissa
    subnormal = (value + _SUBNORMAL_ROUNDER) - _SUBNORMAL_ROUNDER
    return tl.where(tl.abs(value) < _SMALLEST_NORMAL, subnormal, normal)
