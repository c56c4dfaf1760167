"""Every head's rows times a matrix of the head's own, with fixed tiles: a row's bits depend on the row alone."""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "heads"])
def head_product_kernel(
    x,  # F [N, heads, IN]
    factor,  # F [heads, IN, OUT_SIZE], or [heads, OUT_SIZE, IN] with IS_TRANSPOSED; heads are factor_stride apart
    out,  # F [N, heads, OUT_SIZE]; heads are out_stride apart
    num_rows,
    heads,
    factor_stride,
    out_stride,
    IN: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """Grid: (ceil(N / TOKENS), ceil(OUT_SIZE / OUT), heads)."""
    head = tl.program_id(2)
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * OUT + tl.arange(0, OUT))[None, :]
    is_row, is_column = row < num_rows, column < OUT_SIZE
    rows, factor = x + (row * heads + head) * IN, factor + head.to(tl.int64) * factor_stride
    total = tl.zeros((TOKENS, OUT), tl.float32)
    for first in range(0, IN, BLOCK_IN):
        across, down = (first + tl.arange(0, BLOCK_IN))[None, :], (first + tl.arange(0, BLOCK_IN))[:, None]
        values = tl.load(rows + across, mask=is_row & (across < IN), other=0.0)
        at = column * IN + down if IS_TRANSPOSED else down * OUT_SIZE + column
        weights = tl.load(factor + at, mask=is_column & (down < IN), other=0.0)
        total = tl.dot(values, weights, total, input_precision="tf32x3")
    of_rows = out + (row * heads + head) * out_stride + column
    tl.store(of_rows, total.to(out.dtype.element_ty), mask=is_row & is_column)
