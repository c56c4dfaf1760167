"""The kernel that joins what the splits of a tile left behind; a tile that was not split is finished already.

Names in grid expressions are those of attention.py.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import load_place, load_range, plan_item, query_row, split_and_number
from dflash_trt.kernels.attention_softmax import divisor_of


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "block_rows",
        "kv_heads",
        "heads_per_kv",
        "heads_reciprocal",
        "max_lag",
        "window_step",
        "min_rows",
        "max_rows",
        "work_slots",
        "has_sinks",
    ]
)
def attention_reduction_kernel(
    attended,  # out, F [N, heads, D]
    partials,  # float32 [work_slots, kv_heads, TILE, D]
    partial_stats,  # float32 [work_slots, kv_heads, 2, TILE]
    plan,  # int32 [items, PLAN_WORDS]; read only with PLANNED
    token_offsets,
    context_lens,
    sinks,  # float32 [heads]; read only with has_sinks
    num_requests,
    block_rows,
    kv_heads,
    heads_per_kv,
    heads_reciprocal,
    max_lag,
    window_step,
    min_rows,
    max_rows,
    work_slots,
    has_sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    PLANNED: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile, taken by one program
    STAGES: tl.constexpr,  # of the loads' pipeline
):
    """Join the splits of each tile that has more than one. Grid: (kv_heads, tile_capacity, TILE / ROWS).

    They are added one by one: what the sum is rounded to does not depend on how many splits without keys there are.
    """
    kv_head = tl.program_id(0)
    if PLANNED:
        _, token, num_rows, _, _, _ = load_range(plan, tl.program_id(1))
        slot, splits = load_place(plan, tl.program_id(1))
    else:
        _, token, num_rows, _, _, _, slot, splits = plan_item(
            tl.program_id(1),
            tl.num_programs(1),
            token_offsets,
            context_lens,
            num_requests,
            block_rows,
            TILE // heads_per_kv,
            max_lag,
            window_step,
            min_rows,
            max_rows,
            work_slots,
            0,
            TILE,
            KEY_BLOCK,
            REQUESTS,
            HAS_BLOCK,
        )
    _, num_splits = split_and_number(splits)
    if (num_rows == 0) | (num_splits == 1):
        return
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = query_row(in_tile, heads_reciprocal)
    is_row = row < num_rows
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    is_part = is_row[:, None] & is_dim[None, :]

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, DIM], tl.float32)
    first = slot.to(tl.int64) * kv_heads + kv_head
    stats = partial_stats + first * (2 * TILE) + in_tile
    parts = partials + first * (TILE * HEAD_DIM) + (in_tile[:, None] * HEAD_DIM + dim[None, :])
    for _ in tl.range(0, num_splits, num_stages=STAGES):
        part_maximum = tl.load(stats, mask=is_row, other=float("-inf"))
        part_total = tl.load(stats + TILE, mask=is_row, other=0.0)
        part = tl.load(parts, mask=is_part, other=0.0)
        stats += kv_heads * (2 * TILE)
        parts += kv_heads * (TILE * HEAD_DIM)
        new_maximum = tl.maximum(maximum, part_maximum)
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2(part_maximum - shift)
        decay = tl.exp2(maximum - shift)
        total = total * decay + part_total * weight
        output = output * decay[:, None] + part * weight[:, None]
        maximum = new_maximum
    divisor = divisor_of(maximum, total, sinks + kv_head * heads_per_kv, in_tile, row, heads_per_kv, has_sinks)
    offset = (in_tile + row * (kv_heads - 1) * heads_per_kv)[:, None] * HEAD_DIM + dim[None, :]
    out = attended + (token.to(tl.int64) * kv_heads + kv_head) * heads_per_kv * HEAD_DIM
    tl.store(out + offset, output / divisor[:, None], mask=is_part)
