"""Kernels that store the inputs of latent attention: one norms latents and rotates keys into pages.

The rotated part of the queries is stored after the part that the key's factor has produced. Norm and rotation are in
float32 and rounded once, when stored; angles and pages are found as in rope_and_pages.py. The other kernel is a
plugin's, for rows that are ready.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from dflash_trt.kernels.latent_attention import is_direct
from dflash_trt.kernels.rope_and_pages import cos_and_sin, pooled, request_of, rotated
from dflash_trt.kernels.row_codes import e4m3


@triton.jit
def load_pairs(x, head, num_heads, pitch, ROPE: tl.constexpr, HALF: tl.constexpr, IS_PAIRED: tl.constexpr):
    """RoPE pairs of some heads of one row, `pitch` apart: first and second parts, float32 [HEADS, HALF]."""
    pair = tl.arange(0, HALF)
    mask = (head < num_heads)[:, None] & (pair < ROPE // 2)[None, :]
    rows = x + (head * pitch)[:, None]
    at_first, at_second = (2 * pair, 2 * pair + 1) if IS_PAIRED else (pair, pair + ROPE // 2)
    first = tl.load(rows + at_first[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(rows + at_second[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_halves(out, first, second, head, num_heads, pitch, ROPE: tl.constexpr, HALF: tl.constexpr):
    """First ones, then second ones."""
    pair = tl.arange(0, HALF)
    mask = (head < num_heads)[:, None] & (pair < ROPE // 2)[None, :]
    rows = out + (head * pitch)[:, None] + pair[None, :]
    tl.store(rows, first.to(out.dtype.element_ty), mask=mask)
    tl.store(rows + ROPE // 2, second.to(out.dtype.element_ty), mask=mask)


# As in attention.py: one build serves steps of all sizes. Strides are the engine's, and nearly always multiples.
@triton.jit(do_not_specialize=["heads", "num_requests", "pages_per_request", "page_shift", "part", "part_shift"])
def store_latents_kernel(
    q_rope,  # F, N rows of heads q_pitch apart, ROPE each, the rows q_stride
    latents,  # F, N rows of LATENT, latent_stride apart: before their norm
    k_rope,  # F, N rows of ROPE, k_stride apart
    queries,  # out, F [N, heads, LATENT + ROPE]: written after the first LATENT of each head
    pages,  # out, F or float8_e4m3fn [pages, page_size >> part_shift, LATENT + ROPE]
    rows,  # out, F [N, LATENT + ROPE]: what the pages hold of these rows; written only with STORES_ROWS
    norm,  # F [LATENT]
    inv_freq,  # float32 [ROPE / 2]
    positions,  # int32 [N]
    token_offsets,  # int32 [R + 1]
    page_table,  # int32 [R, pages_per_request]
    amplitude,  # factor of cos and sin
    eps,
    k_scale,  # for FP8 pages
    latent_stride,
    k_stride,
    q_stride,
    q_pitch,
    heads,
    num_requests,
    pages_per_request,
    page_shift,
    part,  # pages have the positions whose last part_shift bits are these
    part_shift,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_DIM: tl.constexpr,  # padded to a power of two
    HALF: tl.constexpr,  # ROPE / 2 padded to a power of two
    HEADS: tl.constexpr,  # per program
    REQUESTS: tl.constexpr,
    STORES_ROWS: tl.constexpr,
    IS_PAIRED: tl.constexpr,  # the two of a pair are neighbours; they come out as halves
):
    """Grid: (N, 1 + blocks of HEADS query heads)."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    long_row = row.to(tl.int64)
    cos, sin = cos_and_sin(tl.load(positions + row), inv_freq, amplitude, ROPE, ROPE, HALF)
    if block > 0:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        first, second = load_pairs(q_rope + long_row * q_stride, head, heads, q_pitch, ROPE, HALF, IS_PAIRED)
        first, second = rotated(first, second, cos, sin)
        out = queries + long_row * heads * (LATENT + ROPE) + LATENT
        store_halves(out, first, second, head, heads, LATENT + ROPE, ROPE, HALF)
        return
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    if request >= num_requests:
        return
    position = tl.load(positions + row)
    page = tl.load(page_table + request.to(tl.int64) * pages_per_request + (position >> page_shift)).to(tl.int64)
    in_page = position & ((1 << page_shift) - 1)
    is_own = in_page & ((1 << part_shift) - 1) == part
    out = pages + (page * ((1 << page_shift) >> part_shift) + (in_page >> part_shift)) * (LATENT + ROPE)
    in_latent = tl.arange(0, LATENT_DIM)
    latent = tl.load(latents + long_row * latent_stride + in_latent, mask=in_latent < LATENT, other=0.0).to(tl.float32)
    weight = tl.load(norm + in_latent, mask=in_latent < LATENT, other=0.0).to(tl.float32)
    latent = latent / tl.sqrt(tl.sum(latent * latent, 0) / LATENT + eps) * weight
    only = tl.arange(0, 1)
    first, second = load_pairs(k_rope + long_row * k_stride, only, 1, 0, ROPE, HALF, IS_PAIRED)
    first, second = rotated(first, second, cos, sin)
    if pages.dtype.element_ty == tl.float8e4nv:
        latent, first, second = e4m3(latent, k_scale), e4m3(first, k_scale), e4m3(second, k_scale)
    if is_own:
        tl.store(out + in_latent, latent.to(pages.dtype.element_ty), mask=in_latent < LATENT)
        store_halves(out + LATENT, first, second, only, 1, 0, ROPE, HALF)
    if STORES_ROWS:
        if pages.dtype.element_ty == tl.float8e4nv:
            latent, first, second = latent * k_scale, first * k_scale, second * k_scale
        out = rows + long_row * (LATENT + ROPE)
        tl.store(out + in_latent, latent.to(rows.dtype.element_ty), mask=in_latent < LATENT)
        store_halves(out + LATENT, first, second, only, 1, 0, ROPE, HALF)


@triton.jit
def write_latents_kernel(
    rows,  # F [N, ROW], normed and rotated
    pages,  # F or float8_e4m3fn [pages, page_size, ROW]; its type alone is read
    kept,  # out, F [N, ROW]: what FP8 pages hold of these rows; pages of F hold the rows themselves
    direct,  # out, F [N, direct_columns]: zeros, but for the rows that are attended directly
    state_pools,  # int64 [states]; pages are at its `state_index`
    positions,  # int32 [N]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    page_table,  # int32 [R, pages_per_request]
    k_scale,  # for FP8 pages
    min_direct_rows,  # see `is_direct`
    direct_columns,
    num_requests,
    pages_per_request,
    page_shift,
    state_index,
    ROW: tl.constexpr,
    ROW_DIM: tl.constexpr,  # padded to a power of two
    ZEROS: tl.constexpr,  # stored at once
    REQUESTS: tl.constexpr,
):
    """Grid: (N,)."""
    pages = pooled(state_pools, state_index, pages.dtype)
    if pages.to(tl.int64) == 0:  # no state
        return
    row = tl.program_id(0)
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    own = direct + row.to(tl.int64) * direct_columns
    if request >= num_requests:
        store_zeros(own, direct_columns, ZEROS)
        return
    if not is_direct(request, token_offsets, context_lens, min_direct_rows):
        store_zeros(own, direct_columns, ZEROS)
    position = tl.load(positions + row)
    page = tl.load(page_table + request.to(tl.int64) * pages_per_request + (position >> page_shift)).to(tl.int64)
    page_size = 1 << page_shift
    out = pages + (page * page_size + (position & (page_size - 1))) * ROW
    column = tl.arange(0, ROW_DIM)
    in_rows = row.to(tl.int64) * ROW + column
    value = tl.load(rows + in_rows, mask=column < ROW, other=0.0).to(tl.float32)
    if pages.dtype.element_ty == tl.float8e4nv:
        value = e4m3(value, k_scale)
        tl.store(kept + in_rows, (value * k_scale).to(kept.dtype.element_ty), mask=column < ROW)
    tl.store(out + column, value.to(pages.dtype.element_ty), mask=column < ROW)


@triton.jit
def store_zeros(out, num_columns, ZEROS: tl.constexpr):
    for first in range(0, num_columns, ZEROS):
        column = first + tl.arange(0, ZEROS)
        tl.store(out + column, tl.zeros([ZEROS], out.dtype.element_ty), mask=column < num_columns)
