"""RMS norm, optionally after a residual addition, and gated activations: one read, one write.

`reference_norm.py` is the same in PyTorch. fp32 inside, rounded once per output. RESULT: the result may be converted to
codes for the next GEMM, rounded on the way as if it had been stored (`row_codes.py`).
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.row_codes import store_row


@triton.jit
def rms_norm_kernel(
    x,  # F [N, hidden_size], rows x_stride apart
    weight,  # F [hidden_size]
    normed,  # F or codes [N, hidden_size], contiguous
    block_scale,  # block scales of the codes; see `store_row`
    scale,  # float32 [1], of the codes
    eps,
    x_stride,
    hidden_size,
    BLOCK: tl.constexpr,  # power of two >= hidden_size
    RESULT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < hidden_size
    value = tl.load(x + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    result = normed_row(value, weight, columns, is_in, eps, hidden_size).to(x.dtype.element_ty)
    store_row(normed, block_scale, scale, result, row, 0, hidden_size, BLOCK, RESULT)


@triton.jit
def add_rms_norm_kernel(
    x,  # F [N, hidden_size], contiguous, as all of them
    residual,  # F [N, hidden_size]
    weight,  # F [hidden_size]
    total,  # F [N, hidden_size]: x + residual
    normed,  # F or codes [N, hidden_size]: the norm of the rounded total
    block_scale,  # block scales of the codes; see `store_row`
    scale,  # float32 [1], of the codes
    eps,
    hidden_size,
    BLOCK: tl.constexpr,
    RESULT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < hidden_size
    at = row * hidden_size + columns
    added = tl.load(x + at, mask=is_in, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=is_in, other=0.0).to(tl.float32)
    added = added.to(total.dtype.element_ty)  # norm the stored value, which the next layer reads
    tl.store(total + at, added, mask=is_in)
    result = normed_row(added.to(tl.float32), weight, columns, is_in, eps, hidden_size).to(x.dtype.element_ty)
    store_row(normed, block_scale, scale, result, row, 0, hidden_size, BLOCK, RESULT)


@triton.jit
def gated_mul_kernel(
    gate_up,  # F [N, 2 * ffn_size], contiguous: gate, then up
    gated,  # F or codes [N, ffn_size]
    block_scale,  # block scales of the codes; see `store_row`
    scale,  # float32 [1], of the codes
    ffn_size,
    BLOCK: tl.constexpr,
    RESULT: tl.constexpr,
    IS_GELU: tl.constexpr,  # in its approximation with tanh; else SiLU
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    is_in = columns < ffn_size
    gate = tl.load(gate_up + row * 2 * ffn_size + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn_size + ffn_size + columns, mask=is_in, other=0.0)
    activated = gelu_tanh(gate) if IS_GELU else gate / (1.0 + tl.exp(-gate))
    activated = activated.to(up.dtype)  # rounded here too: the network's activation is an op of its own
    result = (activated.to(tl.float32) * up.to(tl.float32)).to(up.dtype)
    store_row(gated, block_scale, scale, result, row, first, ffn_size, BLOCK, RESULT)


@triton.jit
def sigmoid_mul_kernel(
    x,  # F [N, num_columns], contiguous
    gate,  # F [N, num_columns], or [N] with IS_SCALAR
    gated,  # F [N, num_columns]
    num_columns,
    BLOCK: tl.constexpr,
    IS_SCALAR: tl.constexpr,
):
    """x * sigmoid(gate). Grid: (N, ceil(num_columns / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in, at = columns < num_columns, row * num_columns + columns
    if IS_SCALAR:
        value = tl.load(gate + row + tl.zeros_like(columns)).to(tl.float32)
    else:
        value = tl.load(gate + at, mask=is_in, other=0.0).to(tl.float32)
    sigmoid = (1.0 / (1.0 + tl.exp(-value))).to(gated.dtype.element_ty)  # rounded here too, as ops of their own would
    product = tl.load(x + at, mask=is_in, other=0.0).to(tl.float32) * sigmoid.to(tl.float32)
    tl.store(gated + at, product.to(gated.dtype.element_ty), mask=is_in)


@triton.jit
def gelu_tanh(x):
    """x / 2 * (1 + tanh(u)), which is x * sigmoid(2 u)."""
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)  # sqrt(2 / pi)
    return x / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def normed_row(value, weight, columns, is_in, eps, hidden_size):
    mean_square = tl.sum(value * value, axis=0) / hidden_size
    scale = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    return value * (1.0 / tl.sqrt_rn(mean_square + eps)) * scale
