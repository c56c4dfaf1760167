"""NVFP4 codes and block scales with a static global scale, as in `formats/nvfp4.py`."""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.quantize_fp8 import quotient, round_e4m3

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
