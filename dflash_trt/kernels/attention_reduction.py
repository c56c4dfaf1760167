"""The kernel that joins what the splits of a tile left behind; a tile that was not split is finished already.

Names in grid expressions are those of attention.py.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import locate, request_lengths, splits_of, tiles_and_blocks


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "block_rows",
        "kv_heads",
        "heads_per_kv",
        "max_lag",
        "min_rows",
        "max_rows",
        "work_slots",
    ]
)
def attention_reduction_kernel(
    attended,  # out, F [N, heads, D]
    partials,  # float32 [2 * work_slots, kv_heads, TILE, D]
    partial_stats,  # float32 [2 * work_slots, kv_heads, 2, TILE]
    token_offsets,
    context_lens,
    num_requests,
    block_rows,
    kv_heads,
    heads_per_kv,
    max_lag,
    min_rows,
    max_rows,
    work_slots,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile, taken by one program
    SPLITS: tl.constexpr,  # partial results loaded at once
):
    """Join the splits of each tile that has more than one. Grid: (kv_heads, row_capacity, TILE / ROWS)."""
    kv_head = tl.program_id(0)
    rows_per_tile = TILE // heads_per_kv
    request, tile, first_slot, blocks_per_split = locate(
        tl.program_id(1),
        token_offsets,
        context_lens,
        num_requests,
        block_rows,
        rows_per_tile,
        max_lag,
        min_rows,
        max_rows,
        work_slots,
        TILE,
        KEY_BLOCK,
        REQUESTS,
        HAS_BLOCK,
        True,
    )
    if request >= num_requests:
        return
    num_rows, context = request_lengths(token_offsets, context_lens, request, True, block_rows, HAS_BLOCK)
    num_tiles, num_blocks = tiles_and_blocks(
        num_rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK, HAS_BLOCK
    )
    num_splits = splits_of(num_blocks, blocks_per_split)
    if num_splits == 1:
        return
    first_token = request * block_rows if HAS_BLOCK else tl.load(token_offsets + request)
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = tile * rows_per_tile + in_tile // heads_per_kv
    is_row = (in_tile < rows_per_tile * heads_per_kv) & (row < num_rows)
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIM], tl.float32)
    for first_split in range(0, num_splits, SPLITS):
        split = first_split + tl.arange(0, SPLITS)
        slot_head = (first_slot + split * num_tiles + tile).to(tl.int64) * kv_heads + kv_head  # [SPLITS]
        is_part = (split < num_splits)[:, None] & is_row[None, :]
        stats = partial_stats + slot_head[:, None] * (2 * TILE) + in_tile[None, :]
        part_maximum = tl.load(stats, mask=is_part, other=float("-inf"))  # [SPLITS, ROWS]
        part_total = tl.load(stats + TILE, mask=is_part, other=0.0)
        offset = (slot_head[:, None] * TILE + in_tile[None, :])[:, :, None] * HEAD_DIM + dim[None, None, :]
        part = tl.load(partials + offset, mask=is_part[:, :, None] & is_dim[None, None, :], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(part_maximum - shift[None, :])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(part_total * weight, 0)
        output = output * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        maximum = new_maximum
    head = kv_head * heads_per_kv + in_tile % heads_per_kv
    offset = ((first_token + row).to(tl.int64) * (kv_heads * heads_per_kv) + head)[:, None] * HEAD_DIM + dim[None, :]
    divisor = tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(attended + offset, output / divisor, mask=is_row[:, None] & is_dim[None, :])
