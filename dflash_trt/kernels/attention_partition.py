"""Partition of a step's attention among programs, each of which computes its part from lengths on the device.

So the grid depends on capacities alone and a launch can be captured in a CUDA graph without a plan from the host.

The query rows of a request are cut into tiles, the keys a tile may see into splits. All tiles of a request have the
same number of splits: as many as bring the step's work, counted in key blocks, to about `work_slots` equal pieces
per K/V head. Then tiles + work_slots bounds the number of items, and 2 * work_slots the number of partial results,
because a tile of b blocks is split only when b exceeds the piece p, and ceil(b / p) <= 2 * b / p.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl


@triton.jit
def ceil_div(a, b):
    return (a + b - 1) // b


@triton.jit
def tiles_and_blocks(
    rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK: tl.constexpr, HAS_BLOCK: tl.constexpr
):
    """Query tiles of a request and the key blocks each reads (an estimate under a window); scalars or vectors."""
    served = tl.where((rows >= min_rows) & (rows <= max_rows), rows, 0)
    keys = context if HAS_BLOCK else context + rows
    seen = tl.minimum(keys, max_lag + tl.minimum(rows, rows_per_tile))
    return ceil_div(served, rows_per_tile), ceil_div(seen, KEY_BLOCK)


@triton.jit
def splits_of(blocks, blocks_per_split):
    return tl.maximum(ceil_div(blocks, blocks_per_split), 1)


@triton.jit
def request_lengths(token_offsets, context_lens, index, is_request, block_rows, HAS_BLOCK: tl.constexpr):
    """(rows, context) of the requests at `index`. Without a block, rows are the request's tokens of the step."""
    context = tl.load(context_lens + index, mask=is_request, other=0)
    if HAS_BLOCK:
        rows = tl.where(is_request, block_rows, 0)
    else:
        start = tl.load(token_offsets + index, mask=is_request, other=0)
        rows = tl.load(token_offsets + index + 1, mask=is_request, other=0) - start
    return rows, context


@triton.jit
def locate(
    index,  # of an item, or of a tile when COUNTS_TILES
    token_offsets,
    context_lens,
    num_requests,
    block_rows,
    rows_per_tile,
    max_lag,
    min_rows,
    max_rows,
    work_slots,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    COUNTS_TILES: tl.constexpr,
):
    """(request, index within the request, its first partial slot, key blocks per split).

    The request is num_requests or more when there is no such item.
    """
    requests = tl.arange(0, REQUESTS)
    rows, context = request_lengths(
        token_offsets, context_lens, requests, requests < num_requests, block_rows, HAS_BLOCK
    )
    tiles, blocks = tiles_and_blocks(rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK, HAS_BLOCK)
    num_blocks = tl.sum(tiles * blocks, 0)
    # The reduction's work for a split grows with the tile: fewer key blocks than this are not worth a split.
    min_blocks_per_split = max(2, TILE // 16)
    blocks_per_split = tl.maximum(ceil_div(num_blocks, work_slots), min_blocks_per_split)
    splits = splits_of(blocks, blocks_per_split)
    items = tiles if COUNTS_TILES else tiles * splits
    request = tl.sum((tl.cumsum(items, 0) <= index).to(tl.int32), 0)
    is_before = requests < request
    local = index - tl.sum(tl.where(is_before, items, 0), 0)
    first_slot = tl.sum(tl.where(is_before & (splits > 1), tiles * splits, 0), 0)
    return request, local, first_slot, blocks_per_split
