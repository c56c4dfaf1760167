"""A linear layer of 8-bit integers: rows of activations become codes with a scale each, then integers are multiplied.

`formats/int8.py` defines the bits: the sums are exact, so that neither tiles nor the order of a sum change them, and no
product after them is fused with a sum.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

_LARGEST = tl.constexpr(127.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it leaves an integer, ties to even


@triton.jit
def token_codes_kernel(
    x,  # F [N, num_columns]
    codes,  # out, int8 [N, num_columns]
    scales,  # out, float32 [N]; infinite, with codes of 0, for a row that is not finite
    num_columns,
    BLOCK: tl.constexpr,
):
    """Grid: (N,)."""
    row = tl.program_id(0).to(tl.int64)
    _store_codes(x, row, None, codes, scales, row, num_columns, BLOCK)


@triton.jit
def entry_codes_kernel(
    x,  # F [N, num_columns]
    weights,  # float32 [N * num_chosen]
    codes,  # out, int8 [N * num_chosen, num_columns]
    scales,  # out, float32 [N * num_chosen]; as of `token_codes_kernel`
    num_columns,
    num_chosen: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row for each of its experts, multiplied by that expert's weight in F. Grid: (N * num_chosen,)."""
    entry = tl.program_id(0).to(tl.int64)
    _store_codes(x, entry // num_chosen, tl.load(weights + entry), codes, scales, entry, num_columns, BLOCK)


@triton.jit
def _store_codes(x, x_row, factor, codes, scales, row, num_columns, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        size = tl.abs(_block(x, x_row, factor, first, num_columns, BLOCK))
        largest = tl.maximum(largest, tl.where(size == size, size, float("inf")))
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), _LARGEST), _SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for first in range(0, num_columns, BLOCK):
        value = tl.where(scale < float("inf"), _block(x, x_row, factor, first, num_columns, BLOCK), 0.0)
        value = tl.div_rn(value, scale + tl.zeros((BLOCK,), tl.float32))
        value = tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST)
        columns = first + tl.arange(0, BLOCK)
        code = ((value + _ROUNDER) - _ROUNDER).to(tl.int8)
        tl.store(codes + row * num_columns + columns, code, mask=columns < num_columns)


@triton.jit
def _block(x, row, factor, first, num_columns, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    value = tl.load(x + row * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
    if factor is None:
        return value
    else:
        return (value * factor).to(x.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def int8_linear_kernel(
    x,  # int8 [N, IN]
    x_scale,  # float32 [N]
    codes,  # int8 [OUT_SIZE, IN]
    weight_scale,  # float32 [OUT_SIZE]
    bias,  # F [OUT_SIZE]; read only with HAS_BIAS
    out,  # F [N, OUT_SIZE]
    num_rows,
    IN: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Grid: (ceil(N / TOKENS), ceil(OUT_SIZE / OUT)). Weights are the left operand: 16 tokens fill an instruction."""
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = tokens < num_rows
    features = (tl.program_id(1) * OUT + tl.arange(0, OUT)).to(tl.int64)
    is_row = features < OUT_SIZE
    sums = tl.zeros((OUT, TOKENS), tl.int32)
    for start in range(0, IN, BLOCK_IN):
        columns = start + tl.arange(0, BLOCK_IN)
        is_in = columns < IN
        w = tl.load(codes + features[:, None] * IN + columns[None, :], mask=is_row[:, None] & is_in[None, :], other=0)
        q = tl.load(x + tokens[:, None] * IN + columns[None, :], mask=is_token[:, None] & is_in[None, :], other=0)
        sums = tl.dot(w, tl.trans(q), sums, out_dtype=tl.int32)
    result = sums.to(tl.float32) * tl.load(weight_scale + features, mask=is_row, other=0.0)[:, None]
    result *= tl.load(x_scale + tokens, mask=is_token, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + features, mask=is_row, other=0.0).to(tl.float32)[:, None]
    at = tokens[:, None] * OUT_SIZE + features[None, :]
    tl.store(out + at, tl.trans(result).to(out.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])
