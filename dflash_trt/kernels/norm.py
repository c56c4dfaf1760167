"""RMS norm, with or without the residual addition before it, and SiLU-times-up, fused: one read, one write.

`reference_norm.py` is the same in PyTorch. fp32 inside, rounded once per output. With HAS_SCALE the result goes on to
FP8 codes for the GEMM that reads it, rounded on the way as if it had been stored.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.quantize_fp8 import e4m3


@triton.jit
def rms_norm_kernel(
    x,  # F [N, hidden_size], rows x_stride apart
    weight,  # F [hidden_size]
    normed,  # F or float8_e4m3fn [N, hidden_size], contiguous
    scale,  # float32 [1], of the codes; read only with HAS_SCALE
    eps,
    x_stride,
    hidden_size,
    BLOCK: tl.constexpr,  # power of two >= hidden_size
    HAS_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < hidden_size
    value = tl.load(x + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    result = normed_row(value, weight, columns, is_in, eps, hidden_size).to(x.dtype.element_ty)
    store_row(normed + row * hidden_size + columns, result, scale, is_in, HAS_SCALE)


@triton.jit
def add_rms_norm_kernel(
    x,  # F [N, hidden_size], contiguous, as all of them
    residual,  # F [N, hidden_size]
    weight,  # F [hidden_size]
    total,  # F [N, hidden_size]: x + residual
    normed,  # F or float8_e4m3fn [N, hidden_size]: the norm of the rounded total
    scale,  # float32 [1], of the codes; read only with HAS_SCALE
    eps,
    hidden_size,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < hidden_size
    at = row * hidden_size + columns
    added = tl.load(x + at, mask=is_in, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=is_in, other=0.0).to(tl.float32)
    added = added.to(total.dtype.element_ty)  # what the next layer reads is what is normed
    tl.store(total + at, added, mask=is_in)
    result = normed_row(added.to(tl.float32), weight, columns, is_in, eps, hidden_size).to(x.dtype.element_ty)
    store_row(normed + at, result, scale, is_in, HAS_SCALE)


@triton.jit
def silu_mul_kernel(
    gate_up,  # F [N, 2 * ffn_size], contiguous: gate, then up
    gated,  # F or float8_e4m3fn [N, ffn_size]
    scale,  # float32 [1], of the codes; read only with HAS_SCALE
    ffn_size,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < ffn_size
    gate = tl.load(gate_up + row * 2 * ffn_size + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * ffn_size + ffn_size + columns, mask=is_in, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)  # rounded here too: the network's silu is an op of its own
    result = (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype)
    store_row(gated + row * ffn_size + columns, result, scale, is_in, HAS_SCALE)


@triton.jit
def normed_row(value, weight, columns, is_in, eps, hidden_size):
    mean_square = tl.sum(value * value, axis=0) / hidden_size
    scale = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    return value * (1.0 / tl.sqrt_rn(mean_square + eps)) * scale


@triton.jit
def store_row(target, value, scale, is_in, HAS_SCALE: tl.constexpr):
    if HAS_SCALE:
        tl.store(target, e4m3(value.to(tl.float32), tl.load(scale)).to(target.dtype.element_ty), mask=is_in)
    else:
        tl.store(target, value, mask=is_in)
