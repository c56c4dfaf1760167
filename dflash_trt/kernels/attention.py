"""The attention kernels: queries over K/V pages, and over a draft block that is in no page.

A program takes one item: a tile of query rows of one request, for all query heads of one K/V head, and one split of
the keys that the tile may see. Rows of the tile are (query row, query head), so that the matrix units are filled by
a verify block and each key is read once for all heads that share it. Scores are kept in base 2. The kernel
itself is a single function, longer than functions elsewhere: splitting it would only name its arguments twice.

Names in grid expressions: `num_rows`, the query rows N of all requests; `tile_capacity` = N / (TILE / heads_per_kv) +
num_requests, which bounds the number of tiles.
"""

# mypy: ignore-errors
# ruff: noqa: C901, N803, SIM102, PIE808  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import (
    SIZES,
    ceil_div,
    first_key,
    load_place,
    load_range,
    plan_item,
    query_row,
    split_and_number,
)
from dflash_trt.kernels.attention_reduction import absorb, divisor_of, for_pages, load_queries, scores_of
from dflash_trt.kernels.rope_and_pages import pooled


@triton.jit
def block_start(block, begin, num_left, right_begin, KEY_BLOCK: tl.constexpr, IS_MASKED: tl.constexpr):
    """The first key of a block: the first `num_left` blocks start at `begin`, the others at `right_begin`."""
    if not IS_MASKED:
        return begin + block * KEY_BLOCK
    return tl.where(block < num_left, begin + block * KEY_BLOCK, right_begin + (block - num_left) * KEY_BLOCK)


@triton.jit
def absorb_stored(
    queries,
    stored,  # pages, this request's row of the page table, page_shift, kv_head, kv_heads
    blocks,  # begin, where num_left key blocks start, and right_begin, where the others do; num_blocks, key_end
    seen,  # [TILE], the first and last key each row sees; read only with IS_MASKED
    factors,  # score_scale * k_scale, softcap
    v_dim,  # [DIM / PARTS], the dimensions of V that this program takes
    state,  # maximum, total, output
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PAGE_RUN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: every row sees every key of these blocks
):
    """Take in `num_blocks` key blocks from the pages."""
    pages, page_rows, page_shift, kv_head, kv_heads = stored
    begin, num_left, right_begin, num_blocks, key_end = blocks
    lowest, highest = seen
    maximum, total, output = state
    scale, softcap = factors
    dim = tl.arange(0, DIM)
    is_dim = dim[None, :] < HEAD_DIM
    is_v_dim = v_dim[None, :] < HEAD_DIM
    in_block = tl.arange(0, KEY_BLOCK)
    num_runs: tl.constexpr = KEY_BLOCK // PAGE_RUN
    in_run = tl.arange(0, PAGE_RUN)[None, :]
    runs = tl.arange(0, num_runs) * PAGE_RUN
    row_size = kv_heads * HEAD_DIM
    alignment: tl.constexpr = HEAD_DIM & -HEAD_DIM  # largest power of 2 that divides a row
    page_size = 1 << page_shift
    # Inside a page 32 bits are enough.
    pages += kv_head * HEAD_DIM
    # The page of a key is loaded one block ahead: a load that waits for another cannot be pipelined far enough.
    next_run = block_start(0, begin, num_left, right_begin, KEY_BLOCK, IS_MASKED) + runs
    next_page = tl.load(page_rows + (next_run >> page_shift), mask=next_run < key_end, other=0)
    for block in range(0, num_blocks):
        key = block_start(block, begin, num_left, right_begin, KEY_BLOCK, IS_MASKED) + in_block
        run = next_run
        page = next_page.to(tl.int64)
        next_run = block_start(block + 1, begin, num_left, right_begin, KEY_BLOCK, IS_MASKED) + runs
        next_page = tl.load(page_rows + (next_run >> page_shift), mask=next_run < key_end, other=0)
        first = page * (2 * page_size * row_size) + (run & (page_size - 1)) * row_size
        # Triton before 3.8 loses divisibility in a reshape, and a hint there too: it would load two bytes at a time.
        slot = tl.reshape(first[:, None] + in_run * row_size, [KEY_BLOCK]) // alignment * alignment
        k_rows = pages + slot[:, None] + dim[None, :]
        v_rows = pages + slot[:, None] + v_dim[None, :] + page_size * row_size
        if IS_MASKED:
            is_stored = (key < key_end)[:, None]
            k = tl.load(k_rows, mask=is_stored & is_dim, other=0.0)
            v = tl.load(v_rows, mask=is_stored & is_v_dim, other=0.0)
        elif HEAD_DIM == DIM:
            k = tl.load(k_rows)
            v = tl.load(v_rows)
        else:
            k = tl.load(k_rows, mask=is_dim, other=0.0)
            v = tl.load(v_rows, mask=is_v_dim, other=0.0)
        products, factor = scores_of(queries, k.to(queries.dtype), scale, softcap, HAS_SOFTCAP)
        if IS_MASKED:
            visible = (key[None, :] >= lowest[:, None]) & (key[None, :] <= highest[:, None])
            products = tl.where(visible, products, float("-inf"))
        maximum, total, output = absorb(products, factor, v.to(queries.dtype), maximum, total, output)
    return maximum, total, output


@triton.jit
def absorb_own_block(
    queries,
    keys,  # rows of this request's block and K/V head, and their stride
    values,
    row,  # [TILE], the slot of each query
    num_rows,
    max_lag,
    max_lead,
    factors,  # score_scale, softcap
    v_dim,
    state,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Take in the keys of the block itself, nearly always one key block."""
    k_rows, k_stride = keys
    v_rows, v_stride = values
    maximum, total, output = state
    scale, softcap = factors
    dim = tl.arange(0, DIM)[None, :]
    for first_slot_row in tl.range(0, num_rows, KEY_BLOCK, num_stages=1):
        slot_row = first_slot_row + tl.arange(0, KEY_BLOCK)
        is_slot = slot_row < num_rows
        k_mask, v_mask = is_slot[:, None] & (dim < HEAD_DIM), is_slot[:, None] & (v_dim < HEAD_DIM)[None, :]
        k = tl.load(k_rows + slot_row[:, None] * k_stride + dim, mask=k_mask, other=0.0)
        v = tl.load(v_rows + slot_row[:, None] * v_stride + v_dim[None, :], mask=v_mask, other=0.0)
        products, factor = scores_of(queries, k, scale, softcap, HAS_SOFTCAP)
        lag = row[:, None] - slot_row[None, :]
        visible = is_slot[None, :] & (lag <= max_lag) & (lag >= -max_lead)
        products = tl.where(visible, products, float("-inf"))
        maximum, total, output = absorb(products, factor, v, maximum, total, output)
    return maximum, total, output


@triton.jit(do_not_specialize=SIZES)
def attention_kernel(
    q,  # F [N, heads, D]
    pages,  # F or float8_e4m3fn [pages, 2, page_size, kv_heads, D]; its type alone is read with POOLED
    state_pools,  # int64 [states], addresses of pages; read only with POOLED
    block_k,  # F, N rows of [kv_heads, D], block_k_stride apart; read only with HAS_BLOCK
    block_v,
    attended,  # out, F [N, heads, D]
    partials,  # float32 [work_slots, kv_heads, TILE, D]
    partial_stats,  # float32 [work_slots, kv_heads, 2, TILE]: maximum, total
    plan,  # int32 [items, PLAN_WORDS]; read only with PLANNED, which reads neither offsets nor lengths
    token_offsets,  # int32 [R + 1]; not read with HAS_BLOCK
    context_lens,  # int32 [R], positions stored before the first query row
    page_table,  # int32 [R, pages_per_request]
    sinks,  # float32 [heads]; read only with has_sinks
    score_scale,  # D ** -0.5
    k_scale,  # for FP8 pages; 1 otherwise
    v_scale,
    softcap,  # read only with HAS_SOFTCAP
    num_requests,
    block_rows,  # S; read only with HAS_BLOCK
    block_k_stride,
    block_v_stride,
    pages_per_request,
    kv_heads,
    heads_per_kv,
    heads_reciprocal,  # reciprocal of heads_per_kv, see `query_row`
    page_shift,  # page_size == 1 << page_shift
    state_index,  # in state_pools
    max_lag,  # a key is visible when -max_lead <= query_position - key_position <= max_lag
    max_lead,
    window_step,  # 1; 0: max_lag counts from the first query row of the request, for all of its rows
    min_rows,  # only requests with min_rows <= rows <= max_rows are served
    max_rows,
    work_slots,
    has_sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM padded to a power of two
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,  # a power of two, at least num_requests
    HAS_BLOCK: tl.constexpr,
    PAGE_RUN: tl.constexpr,  # keys whose page is looked up once; divides page_size and KEY_BLOCK
    HAS_SOFTCAP: tl.constexpr,
    HAS_FULL_LOOP: tl.constexpr,
    FIRST_KEY: tl.constexpr,  # positions before it are hidden
    CHUNK: tl.constexpr,  # positions in a chunk: keys before the query's chunk are hidden; 0 for none
    POOLED: tl.constexpr,
    PLANNED: tl.constexpr,
    PARTS: tl.constexpr,  # parts of V and of the result: a program computes one, and reads all of K
):
    """Grid: (kv_heads * PARTS, tile_capacity + work_slots)."""
    kv_head = tl.program_id(0) // PARTS
    v_dim = tl.program_id(0) % PARTS * (DIM // PARTS) + tl.arange(0, DIM // PARTS)
    if PLANNED:
        request, token, num_rows, position, key_begin, key_end = load_range(plan, tl.program_id(1))
    else:
        request, token, num_rows, position, key_begin, key_end, slot, splits = plan_item(
            tl.program_id(1),
            tl.num_programs(1) - work_slots,
            (token_offsets, context_lens, num_requests),
            block_rows,
            TILE // heads_per_kv,
            (max_lag, window_step),
            (min_rows, max_rows),
            work_slots,
            0,
            TILE,
            KEY_BLOCK,
            REQUESTS,
            HAS_BLOCK,
            CHUNK,
        )
    if num_rows == 0:
        return

    if not HAS_BLOCK:
        if POOLED:  # here, and with a block below: elsewhere ptxas spills registers of some variants
            pages = pooled(state_pools, state_index, pages.dtype)
            if pages.to(tl.int64) == 0:  # no state
                return
    in_tile = tl.arange(0, TILE)
    num_filled = num_rows * heads_per_kv
    # The rest of the tile repeats its last row: masks would cost more.
    filled = tl.minimum(in_tile, num_filled - 1)
    row = query_row(filled, heads_reciprocal)
    dim = tl.arange(0, DIM)
    is_dim = dim[None, :] < HEAD_DIM
    heads = kv_heads * heads_per_kv
    # A tile's own offsets fit into 32 bits.
    q_first = (token.to(tl.int64) * heads + kv_head * heads_per_kv) * HEAD_DIM
    to_next_row = (heads - heads_per_kv) * HEAD_DIM
    q_offset = (filled * HEAD_DIM + row * to_next_row)[:, None] + dim[None, :]
    queries = load_queries(q + q_first + q_offset, is_dim, HEAD_DIM == DIM)
    if HAS_BLOCK:
        if POOLED:
            pages = pooled(state_pools, state_index, pages.dtype)
            if pages.to(tl.int64) == 0:  # no state
                return
    queries = for_pages(queries, pages)

    # A window moves with the row, or counts from the request's first.
    anchor = position
    if HAS_BLOCK:
        anchor -= tl.where(window_step > 0, 0, token - request * block_rows)
    lowest = first_key(anchor + row * window_step - max_lag, position + row, CHUNK, FIRST_KEY)
    highest = tl.minimum(position + row + max_lead, key_end - 1)

    state = (
        tl.full([TILE], float("-inf"), tl.float32),
        tl.zeros([TILE], tl.float32),
        tl.zeros([TILE, DIM // PARTS], tl.float32),
    )
    stored = (pages, page_table + request.to(tl.int64) * pages_per_request, page_shift, kv_head, kv_heads)
    seen = (lowest, highest)
    factors = (score_scale * k_scale, softcap)
    full_begin = key_begin
    full_end = key_begin
    if HAS_FULL_LOOP:  # the blocks that every row of the tile sees whole, without masks
        last_lowest = anchor + (num_rows - 1) * window_step - max_lag
        last_lowest = first_key(last_lowest, position + num_rows - 1, CHUNK, FIRST_KEY)
        first_full = ceil_div(tl.maximum(last_lowest, key_begin), KEY_BLOCK) * KEY_BLOCK
        last_full = tl.minimum(position + max_lead + 1, key_end) // KEY_BLOCK * KEY_BLOCK
        full_begin = tl.where(first_full < last_full, first_full, key_begin)
        full_end = tl.where(first_full < last_full, last_full, key_begin)
        num_full = (full_end - full_begin) // KEY_BLOCK
        blocks = (full_begin, num_full, full_end, num_full, key_end)
        state = absorb_stored(
            queries, stored, blocks, seen, factors, v_dim, state, HEAD_DIM, DIM, KEY_BLOCK, PAGE_RUN, HAS_SOFTCAP, False
        )
    num_left = (full_begin - key_begin) // KEY_BLOCK
    num_blocks = num_left + ceil_div(key_end - full_end, KEY_BLOCK)
    blocks = (key_begin, num_left, full_end, num_blocks, key_end)
    maximum, total, output = absorb_stored(
        queries, stored, blocks, seen, factors, v_dim, state, HEAD_DIM, DIM, KEY_BLOCK, PAGE_RUN, HAS_SOFTCAP, True
    )
    output *= v_scale

    if PLANNED:  # not before: two registers less in the loop
        slot, splits = load_place(plan, tl.program_id(1))
    split, num_splits = split_and_number(splits)
    if HAS_BLOCK:
        if split == num_splits - 1:
            first_slot_row = request * block_rows
            block_queries = queries
            if queries.dtype != q.dtype.element_ty:  # over FP8 pages
                block_queries = load_queries(q + q_first + q_offset, is_dim, HEAD_DIM == DIM)
            maximum, total, output = absorb_own_block(
                block_queries,
                (block_k + first_slot_row.to(tl.int64) * block_k_stride + kv_head * HEAD_DIM, block_k_stride),
                (block_v + first_slot_row.to(tl.int64) * block_v_stride + kv_head * HEAD_DIM, block_v_stride),
                token - first_slot_row + row,
                block_rows,
                # A window that counts from the first row hides nothing of the block itself.
                tl.where(window_step > 0, max_lag, block_rows),
                max_lead,
                (score_scale, softcap),
                v_dim,
                (maximum, total, output),
                HEAD_DIM,
                DIM,
                KEY_BLOCK,
                HAS_SOFTCAP,
            )

    # Not the rows and offsets of above: kept through the loop, these would spill.
    row = query_row(in_tile, heads_reciprocal)
    is_out = (in_tile < num_rows * heads_per_kv)[:, None] & (v_dim < HEAD_DIM)[None, :]
    if num_splits == 1:
        divisor = divisor_of(maximum, total, sinks + kv_head * heads_per_kv, in_tile, row, heads_per_kv, has_sinks)
        offset = (in_tile * HEAD_DIM + row * to_next_row)[:, None] + v_dim[None, :]
        tl.store(attended + q_first + offset, output / divisor[:, None], mask=is_out)
    else:
        slot_head = slot.to(tl.int64) * kv_heads + kv_head
        stats = partial_stats + slot_head * (2 * TILE) + in_tile
        tl.store(stats, maximum)
        tl.store(stats + TILE, total)
        offset = in_tile[:, None] * HEAD_DIM + v_dim[None, :]
        tl.store(partials + slot_head * (TILE * HEAD_DIM) + offset, output, mask=is_out)
