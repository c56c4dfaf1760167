"""Rows of activations that pages keep by token position, [pages, page_size, width].

`backends/torch/paged_rows.py` defines the results. Which rows may touch a page is decided on the device. Launching is
in `paged_rows_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.rope_and_pages import pooled, request_of


@triton.jit
def place_of(request, position, page_table, pages_per_request, page_shift):
    """int64: of a position, among the rows of all pages."""
    page = tl.load(page_table + request.to(tl.int64) * pages_per_request + (position >> page_shift)).to(tl.int64)
    return (page << page_shift) + (position & ((1 << page_shift) - 1))


@triton.jit(do_not_specialize=["num_requests", "pages_per_request", "page_shift", "state_index"])
def previous_rows_kernel(
    x,  # F [T, width]
    before,  # out, F [T, width]
    pages,  # F [pages, page_size, width]; its type alone is read with POOLED
    state_pools,  # int64 [states], addresses of pages; read only with POOLED
    positions,  # int32 [T]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    page_table,  # int32 [R, pages_per_request]
    width,
    num_requests,
    pages_per_request,
    page_shift,
    state_index,  # in state_pools
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    POOLED: tl.constexpr,
):
    """Grid: (T, ceil(width / BLOCK)). A request reads only before the positions that it writes."""
    if POOLED:
        pages = pooled(state_pools, state_index, pages.dtype)
        if pages.to(tl.int64) == 0:  # no state
            return
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    own = x + row.to(tl.int64) * width + column
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    is_first = True
    context = 0
    if request < num_requests:
        is_first = row == tl.load(token_offsets + request)
        context = tl.load(context_lens + request)
        place = place_of(request, tl.load(positions + row), page_table, pages_per_request, page_shift)
        tl.store(pages + place * width + column, tl.load(own, mask=is_in, other=0.0), mask=is_in)
    if is_first:
        previous = tl.zeros((BLOCK,), x.dtype.element_ty)
        if context > 0:
            place = place_of(request, context - 1, page_table, pages_per_request, page_shift)
            previous = tl.load(pages + place * width + column, mask=is_in, other=0.0)
    else:
        previous = tl.load(own - width, mask=is_in, other=0.0)
    tl.store(before + row.to(tl.int64) * width + column, previous, mask=is_in)


@triton.jit(do_not_specialize=["pages_per_request", "page_shift"])
def last_rows_kernel(
    pages,  # F [pages, page_size, width]
    lengths,  # int32 [R]
    page_table,  # int32 [R, pages_per_request]
    rows,  # out, F [R, width]: at lengths - 1, zeros where that is no position
    width,
    pages_per_request,
    page_shift,
    BLOCK: tl.constexpr,
):
    """Grid: (R, ceil(width / BLOCK))."""
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    length = tl.load(lengths + request)
    row = tl.zeros((BLOCK,), rows.dtype.element_ty)
    if length > 0:
        place = place_of(request, length - 1, page_table, pages_per_request, page_shift)
        row = tl.load(pages + place * width + column, mask=is_in, other=0.0)
    tl.store(rows + request.to(tl.int64) * width + column, row, mask=is_in)
