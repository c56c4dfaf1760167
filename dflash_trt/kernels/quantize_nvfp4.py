"""Activations for an NVFP4 GEMM with a static global scale: block scales and codes as in `formats/nvfp4.py`."""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.quantize_fp8 import quotient, round_e4m3

_E2M1_MAX = tl.constexpr(6.0)
_MIN_BLOCK_SCALE = tl.constexpr(2.0**-9)
_BLOCK = tl.constexpr(16)


@triton.jit
def quantize_nvfp4_kernel(
    x,  # F [N, num_columns]
    scale,  # float32 [1]
    codes,  # out, uint8 [N, num_columns / 2], the even column in the low nibble
    block_scale,  # out, float8_e4m3fn [N, num_columns / 16]
    num_columns,  # a multiple of 16
    BLOCK: tl.constexpr,
):
    """Grid: (N, ceil(num_columns / BLOCK))."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    made, scales = nvfp4(value[None, :], tl.load(scale), 1, BLOCK)
    pairs, blocks = first // 2 + tl.arange(0, BLOCK // 2), first // 16 + tl.arange(0, BLOCK // 16)
    tl.store(codes + (row * (num_columns // 2) + pairs)[None, :], made, mask=(pairs < num_columns // 2)[None, :])
    at = (row * (num_columns // 16) + blocks)[None, :]
    tl.store(block_scale + at, scales.to(tl.float8e4nv), mask=(blocks < num_columns // 16)[None, :])


@triton.jit
def nvfp4(value, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [ROWS, COLUMNS], float32 -> codes uint8 [ROWS, COLUMNS / 2], block scales float32 [ROWS, COLUMNS / 16].

    The block scales are numbers of E4M3.
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
