"""Partition of a step's attention among programs, computed on the device, which alone knows lengths.

So the grid depends on capacities only, and a launch can be captured in a CUDA graph without a plan from the host.
`attention_plan_kernel` writes the plan once for all layers that share it; a kernel without a plan computes its own item
with the same function.

The query rows of a request are cut into tiles, the keys a tile may see into splits; an item is one of each. All tiles
of a request have the same number of splits. The split is the smallest whose items fit into one wave of `work_slots`
programs per K/V head: with W key blocks and n tiles, p = W / (work_slots - n) blocks give at most W / p + n =
work_slots items. Where tiles alone take more than half of the wave, p = W / (work_slots / 2): only requests longer than
twice the mean of a slot are split, and ceil(b / p) <= 2 * b / p bounds the partial results. Either way they are at most
`work_slots`.

With CHUNK, a chunk of positions is a window whose lower bound moves in jumps: a query at p sees keys from p // CHUNK *
CHUNK on, and `max_lag` is less than CHUNK.

With `split_blocks` a split has that many key blocks and starts at a multiple of them: then a row's sums and their order
depend only on its own position, not on the other requests or the other rows of its chunk.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl

from dflash_trt.kernels import launch_rules

# Sizes of a step and of a model take no part in what is compiled at first use: one build serves them all, as ahead of
# time. A kernel of attention has some of these arguments.
SIZES = (
    *("num_requests", "pages_per_request", "page_shift", "state_index", "work_slots", "split_blocks"),
    *("block_rows", "rows_per_tile", "min_rows", "max_rows", "min_direct_rows"),
    *("kv_heads", "heads_per_kv", "groups", "group_heads", "heads_reciprocal"),
    *("max_lag", "max_lead", "window_step", "has_sinks"),
)
PLAN_WORDS = tl.constexpr(launch_rules.PLAN_WORDS)  # int32, of an item: the result of `plan_item`, in its order


@triton.jit
def ceil_div(a, b):
    return (a + b - 1) // b


@triton.jit
def query_row(in_tile, heads_reciprocal):
    """in_tile // heads_per_kv, for a reciprocal of ceil(2^16 / heads_per_kv) and up to 128 rows of a tile."""
    return (in_tile * heads_reciprocal) >> 16


@triton.jit
def first_key(lowest, position, CHUNK: tl.constexpr, FIRST_KEY: tl.constexpr):
    """The first key that a query at `position` sees, at least `lowest`; scalars or vectors."""
    if CHUNK > 0:
        lowest = tl.maximum(lowest, position // CHUNK * CHUNK)
    if FIRST_KEY > 0:
        lowest = tl.maximum(lowest, FIRST_KEY)
    return lowest


@triton.jit
def tiles_and_blocks(
    rows,
    context,
    rows_per_tile,
    max_lag,
    min_rows,
    max_rows,
    KEY_BLOCK: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Query tiles of a request and key blocks that each reads (estimated for windows); scalars or vectors."""
    served = tl.where((rows >= min_rows) & (rows <= max_rows), rows, 0)
    keys = context if HAS_BLOCK else context + rows
    seen = tl.minimum(keys, max_lag + tl.minimum(rows, rows_per_tile))
    if CHUNK > 0:  # no tile sees more than the keys from the first row's chunk on
        seen = tl.minimum(seen, context % CHUNK + rows)
    # A window may begin anywhere in a block: its keys can touch one more. Without one, they begin at 0.
    return ceil_div(served, rows_per_tile), ceil_div(seen, KEY_BLOCK) + (seen < keys).to(tl.int32)


@triton.jit
def blocks_per_split(tiles, blocks, work_slots, split_blocks, TILE: tl.constexpr):
    """Key blocks per split, the same for every tile of the step; `tiles` and `blocks` cover all requests."""
    num_tiles = tl.sum(tiles, 0)
    places = tl.maximum(tl.maximum(work_slots - num_tiles, work_slots // 2), 1)
    # The reduction's work for a split grows with the tile: fewer key blocks than this are not worth a split.
    min_blocks = max(2, TILE // 16)
    share = tl.maximum(ceil_div(tl.sum(tiles * blocks, 0), places), min_blocks)
    return tl.where(split_blocks > 0, split_blocks, share)


@triton.jit
def splits_of(blocks, share, split_blocks, is_windowed):
    """Splits of a tile of `blocks` blocks.

    With a window, fixed-length splits may be one more: see the file.
    """
    more = tl.where((split_blocks > 0) & is_windowed, 1, 0)
    return tl.maximum(ceil_div(blocks, share), 1) + more


@triton.jit
def request_lengths(token_offsets, context_lens, index, is_request, block_rows, HAS_BLOCK: tl.constexpr):
    """(rows, context) of the requests at `index`. Without a block, rows are the request's step tokens."""
    context = tl.load(context_lens + index, mask=is_request, other=0)
    if HAS_BLOCK:
        rows = tl.where(is_request, block_rows, 0)
    else:
        start = tl.load(token_offsets + index, mask=is_request, other=0)
        rows = tl.load(token_offsets + index + 1, mask=is_request, other=0) - start
    return rows, context


@triton.jit
def plan_item(
    index,
    tile_capacity,
    requests_of_step,  # token_offsets int32 [R + 1], not read with HAS_BLOCK; context_lens int32 [R]; R
    block_rows,  # S; read only with HAS_BLOCK
    rows_per_tile,
    reach,  # max_lag, window_step
    served,  # min_rows, max_rows
    work_slots,
    split_blocks,  # 0: as many splits as fill the GPU
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr = 0,  # 0: none
):
    """Work of the item at `index`: below `tile_capacity` a tile's first split, else one of the others.

    (request, first query row, number of rows, position of the first, first key, end of keys, index among the partial
    results, split and number of splits). An item without work has no rows.
    """
    token_offsets, context_lens, num_requests = requests_of_step
    max_lag, window_step = reach
    min_rows, max_rows = served
    requests = tl.arange(0, REQUESTS)
    rows, context = request_lengths(
        token_offsets, context_lens, requests, requests < num_requests, block_rows, HAS_BLOCK
    )
    tiles, blocks = tiles_and_blocks(
        rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK, HAS_BLOCK, CHUNK
    )
    share = blocks_per_split(tiles, blocks, work_slots, split_blocks, TILE)
    is_windowed = context + rows > max_lag
    splits = splits_of(blocks, share, split_blocks, is_windowed)
    is_first = index < tile_capacity
    index -= tl.where(is_first, 0, tile_capacity)
    items = tl.where(is_first, tiles, tiles * (splits - 1))
    request = tl.sum((tl.cumsum(items, 0) <= index).to(tl.int32), 0)
    is_before = requests < request
    local = index - tl.sum(tl.where(is_before, items, 0), 0)
    first_slot = tl.sum(tl.where(is_before & (splits > 1), tiles * splits, 0), 0)

    is_item = request < num_requests
    num_rows, context = request_lengths(token_offsets, context_lens, request, is_item, block_rows, HAS_BLOCK)
    num_tiles, num_blocks = tiles_and_blocks(
        num_rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK, HAS_BLOCK, CHUNK
    )
    num_splits = splits_of(num_blocks, share, split_blocks, context + num_rows > max_lag)
    # Neighbouring items are the tiles of one split, which read the same keys.
    num_tiles = tl.maximum(num_tiles, 1)
    split = local // num_tiles + tl.where(is_first, 0, 1)
    tile = local % num_tiles
    first_row = tile * rows_per_tile
    tile_rows = tl.minimum(num_rows - first_row, rows_per_tile)
    key_stop = context if HAS_BLOCK else context + first_row + tile_rows
    lowest = tl.maximum(context + first_row * window_step - max_lag, 0)
    key_start = first_key(lowest, context + first_row, CHUNK, 0) // KEY_BLOCK
    num_blocks = ceil_div(tl.maximum(key_stop - key_start * KEY_BLOCK, 0), KEY_BLOCK)
    length = tl.maximum(tl.where(split_blocks > 0, split_blocks, ceil_div(num_blocks, num_splits)), 1)
    origin = tl.where(split_blocks > 0, key_start // length * length, key_start)
    key_begin = tl.maximum(origin + split * length, key_start) * KEY_BLOCK
    key_end = tl.minimum((origin + (split + 1) * length) * KEY_BLOCK, key_stop)
    token = request * block_rows if HAS_BLOCK else tl.load(token_offsets + request, mask=is_item, other=0)
    return (
        request,
        token + first_row,
        tl.where(is_item, tile_rows, 0),
        context + first_row,
        key_begin,
        key_end,
        first_slot + tile * num_splits + split,
        split * 65536 + num_splits,
    )


@triton.jit
def split_and_number(splits):
    """(split, number of splits) from the last word of an item."""
    return splits >> 16, splits & 65535


@triton.jit
def load_range(plan, index):
    """The first six words of `plan_item`, as the plan's kernel has written them: rows and keys.

    All at once: volatile, or the compiler would load most of them after a branch on one.
    """
    words = plan + index * PLAN_WORDS
    return (
        tl.load(words, volatile=True),
        tl.load(words + 1, volatile=True),
        tl.load(words + 2, volatile=True),
        tl.load(words + 3, volatile=True),
        tl.load(words + 4, volatile=True),
        tl.load(words + 5, volatile=True),
    )


@triton.jit
def load_place(plan, index):
    """The last two words: place among the partial results, split and number of splits."""
    words = plan + index * PLAN_WORDS
    return tl.load(words + 6), tl.load(words + 7)


@triton.jit(do_not_specialize=SIZES)
def attention_plan_kernel(
    plan,  # out, int32 [items, PLAN_WORDS]
    token_offsets,
    context_lens,
    num_requests,
    block_rows,
    rows_per_tile,
    max_lag,
    window_step,
    min_rows,
    max_rows,
    work_slots,
    split_blocks,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All items of a step. Grid: (tiles + work_slots,)."""
    index = tl.program_id(0)
    item = plan_item(
        index,
        tl.num_programs(0) - work_slots,
        (token_offsets, context_lens, num_requests),
        block_rows,
        rows_per_tile,
        (max_lag, window_step),
        (min_rows, max_rows),
        work_slots,
        split_blocks,
        TILE,
        KEY_BLOCK,
        REQUESTS,
        HAS_BLOCK,
        CHUNK,
    )
    words = plan + index * PLAN_WORDS
    for i in tl.static_range(8):
        tl.store(words + i, item[i])
