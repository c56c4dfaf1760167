"""Absorbed attention over latent pages: all heads attend over one row per token, latent as value.

A program computes one item of a plan, as in attention.py: a tile of query rows of one request and one split of the
keys. Rows of the tile are (query row, query head) of one group of heads, so that a verify block fills the matrix units.
They are consecutive in memory: a tile has all heads of its rows, or a group of the heads of one row. A latent is copied
to shared memory once, where the products for scores and for the sum of values both read it. Sums of 64 rows of 512
values leave few registers, so values that would occupy some across the loop are read or computed again after it. Scores
are kept in base 2.

Names in grid expressions are as in attention.py; `groups` of `group_heads` heads replace K/V heads.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import SIZES, load_place, load_range, query_row, split_and_number
from dflash_trt.kernels.attention_reduction import LOG2_E, absorb, for_pages
from dflash_trt.kernels.rope_and_pages import pooled


@triton.jit
def load_columns(rows, column, NUM: tl.constexpr, PADDED: tl.constexpr):
    """`NUM` columns of each row, from pointers [ROWS, 1]; zeros up to `PADDED`."""
    if NUM == PADDED:
        return tl.load(rows + column[None, :])
    return tl.load(rows + column[None, :], mask=column[None, :] < NUM, other=0.0)


@triton.jit
def is_direct(request, token_offsets, context_lens, min_direct_rows):
    """True for a prompt that begins in this step with enough rows: latent_chunk.py attends for it."""
    num_rows = tl.load(token_offsets + request + 1) - tl.load(token_offsets + request)
    return (tl.load(context_lens + request) == 0) & (num_rows >= min_direct_rows)


@triton.jit
def log_sum(maximum, total):
    """Logarithm to base 2 of a row's sum of 2 ** score; -inf if it has seen no key."""
    return tl.where(total == 0.0, float("-inf"), maximum + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def absorb_latents(
    q_latent,  # [TILE, LATENT_DIM]
    q_rope,  # [TILE, ROPE_DIM]
    pages,
    page_rows,  # this request's row of the page table
    key_begin,
    key_end,
    highest,  # [TILE], the last key each row sees
    scale,  # for scores, including the pages' scale
    page_shift,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    IS_IN_ONE_PAGE: tl.constexpr,
):
    """(maximum, total, output) of the rows over the keys key_begin .. key_end - 1."""
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    output = tl.zeros([TILE, LATENT_DIM], tl.float32)
    in_block = tl.arange(0, KEY_BLOCK)
    in_latent = tl.arange(0, LATENT_DIM)
    in_rope = tl.arange(0, ROPE_DIM)
    row_size: tl.constexpr = LATENT + ROPE
    page_size = 1 << page_shift
    next_page = tl.load(page_rows + (key_begin >> page_shift), mask=key_begin < key_end, other=0)
    for first_key in range(key_begin, key_end, KEY_BLOCK):
        key = first_key + in_block
        # The rest of the last block repeats its last key: masks would cost registers.
        stored = tl.minimum(key, key_end - 1)
        in_page = (stored & (page_size - 1)) * row_size
        if IS_IN_ONE_PAGE:
            # The page is loaded one block ahead: a load that waits for another cannot be pipelined far enough.
            page = next_page.to(tl.int64)
            next_key = first_key + KEY_BLOCK
            next_page = tl.load(page_rows + (next_key >> page_shift), mask=next_key < key_end, other=0)
            rows = pages + page * page_size * row_size + in_page[:, None]
        else:
            page = tl.load(page_rows + (stored >> page_shift)).to(tl.int64)
            rows = pages + (page * page_size * row_size + in_page)[:, None]
        latent = load_columns(rows, in_latent, LATENT, LATENT_DIM).to(q_latent.dtype)
        rotated = load_columns(rows + LATENT, in_rope, ROPE, ROPE_DIM).to(q_rope.dtype)
        products = tl.dot(q_rope, tl.trans(rotated), input_precision="tf32x3")
        products = tl.dot(q_latent, tl.trans(latent), products, input_precision="tf32x3")
        products = tl.where(key[None, :] <= highest[:, None], products, float("-inf"))
        maximum, total, output = absorb(products, scale * LOG2_E, latent, maximum, total, output)
    return maximum, total, output


@triton.jit(do_not_specialize=SIZES)
def latent_attention_kernel(
    q,  # F [N, heads, LATENT + ROPE], absorbed and rotated; but with POOLED, up to TILE heads after the last are read
    pages,  # F or float8_e4m3fn [pages, page_size, LATENT + ROPE]; its type alone is read with POOLED
    state_pools,  # int64 [states], addresses of pages; read only with POOLED
    attended,  # out, F [N, heads, LATENT]: sums of latents, before the value's factor
    partials,  # float32 [work_slots, groups, TILE, LATENT]
    partial_stats,  # float32 [work_slots, groups, 2, TILE]: maximum, total
    log_sums,  # out, float32 [N, heads], see context_parts.py; written only with HAS_LOG_SUMS, for tiles of one split
    plan,  # int32 [items, PLAN_WORDS]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    page_table,  # int32 [R, pages_per_request]
    score_scale,
    k_scale,  # for FP8 pages; 1 otherwise
    min_direct_rows,  # zeros are stored for requests that `is_direct` names
    pages_per_request,
    groups,
    group_heads,  # heads = groups * group_heads
    heads_reciprocal,  # reciprocal of group_heads, see `query_row`
    page_shift,  # page_size == 1 << page_shift
    state_index,  # in state_pools
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_DIM: tl.constexpr,  # padded to a power of two
    ROPE_DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    IS_IN_ONE_PAGE: tl.constexpr,  # a block of keys: KEY_BLOCK divides page_size
    POOLED: tl.constexpr,
    HAS_LOG_SUMS: tl.constexpr,
):
    """Grid: (groups, tile_capacity + work_slots)."""
    group = tl.program_id(0)
    request, token, num_rows, position, key_begin, key_end = load_range(plan, tl.program_id(1))
    if num_rows == 0:
        return
    if POOLED:
        pages = pooled(state_pools, state_index, pages.dtype)
        if pages.to(tl.int64) == 0:  # no state
            return
    if is_direct(request, token_offsets, context_lens, min_direct_rows):
        key_end = key_begin
    in_tile = tl.arange(0, TILE)
    in_latent = tl.arange(0, LATENT_DIM)
    in_rope = tl.arange(0, ROPE_DIM)
    first_head = ((token * groups + group) * group_heads).to(tl.int64)  # index among the heads of all tokens
    in_q = in_tile
    if POOLED:  # the rest of the tile repeats its last row: there may be no memory after it
        in_q = tl.minimum(in_tile, num_rows * group_heads - 1)
    q_rows = q + first_head * (LATENT + ROPE) + (in_q * (LATENT + ROPE))[:, None]
    q_latent = for_pages(load_columns(q_rows, in_latent, LATENT, LATENT_DIM), pages)
    q_rope = for_pages(load_columns(q_rows + LATENT, in_rope, ROPE, ROPE_DIM), pages)
    maximum, total, output = absorb_latents(
        q_latent,
        q_rope,
        pages,
        page_table + request.to(tl.int64) * pages_per_request,
        key_begin,
        key_end,
        tl.minimum(position + query_row(in_tile, heads_reciprocal), key_end - 1),
        score_scale * k_scale,
        page_shift,
        LATENT,
        ROPE,
        LATENT_DIM,
        ROPE_DIM,
        TILE,
        KEY_BLOCK,
        IS_IN_ONE_PAGE,
    )
    # Read again, and worked out again: the loop needs the registers.
    _, token, num_rows, _, _, _ = load_range(plan, tl.program_id(1))
    is_filled = in_tile < num_rows * group_heads
    first_head = ((token * groups + group) * group_heads).to(tl.int64)
    slot, splits = load_place(plan, tl.program_id(1))
    _, num_splits = split_and_number(splits)
    mask = is_filled[:, None] & (in_latent < LATENT)[None, :]
    offset = in_tile[:, None] * LATENT + in_latent[None, :]
    if num_splits == 1:
        if HAS_LOG_SUMS:
            tl.store(log_sums + first_head + in_tile, log_sum(maximum, total), mask=is_filled)
        output *= (k_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(attended + first_head * LATENT + offset, output, mask=mask)
    else:
        slot_group = slot.to(tl.int64) * groups + group
        stats = partial_stats + slot_group * (2 * TILE) + in_tile
        tl.store(stats, maximum)
        tl.store(stats + TILE, total)
        tl.store(partials + slot_group * (TILE * LATENT) + offset, output * k_scale, mask=mask)
