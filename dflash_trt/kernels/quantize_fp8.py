"""Activations for an FP8 GEMM with a static scale: divide, saturate, round to E4M3, in one launch.

Rounding to nearest even happens in float32 arithmetic, so the conversion after it is exact on any machine. The twin
is `quantize/pack.e4m3`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

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
