"""Row values for several kernels of gated delta nets: lengths of keys, rates, log decays. All float32."""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

_L2_EPS = tl.constexpr(1e-6)  # inside of the square root
_LINEAR = tl.constexpr(20.0)  # from here on softplus is its argument, as in PyTorch


@triton.jit
def inverse_lengths(rows, is_row, KEY_DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Inverse lengths of the vectors of KEY_DIM at `rows`, a vector of pointers."""
    key = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(rows[:, None] + key, mask=is_row[:, None] & (key < KEY_DIM), other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) + _L2_EPS)


@triton.jit
def inverse_length(x):
    """Inverse length of one vector, float32."""
    return 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) + _L2_EPS)


@triton.jit
def rates_of(b, is_row):
    """sigmoid, and 0 where there is no row."""
    value = tl.load(b, mask=is_row, other=0.0).to(tl.float32)
    return tl.where(is_row, 1.0 / (1.0 + tl.exp(-value)), 0.0)


@triton.jit
def decays_of(a, log_rate, dt_bias, is_row):
    """-e^log_rate softplus(a + dt_bias), and 0 where there is no row."""
    value = tl.load(a, mask=is_row, other=0.0).to(tl.float32) + tl.load(dt_bias)
    softplus = tl.where(value > _LINEAR, value, tl.log(1.0 + tl.exp(tl.minimum(value, _LINEAR))))
    return tl.where(is_row, -tl.exp(tl.load(log_rate)) * softplus, 0.0)
