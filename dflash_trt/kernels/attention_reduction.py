"""Kernels that join the partial results of a tile's splits; tiles without splits are finished already.

Names in grid expressions are as in attention.py.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import load_place, load_range, plan_item, query_row, split_and_number
from dflash_trt.kernels.attention_softmax import divisor_of
from dflash_trt.kernels.quantize_fp8 import e4m3


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
    CHUNK: tl.constexpr,
    PLANNED: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the tile per program
    STAGES: tl.constexpr,  # stages of the load pipeline
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
            CHUNK,
        )
    _, num_splits = split_and_number(splits)
    if (num_rows == 0) | (num_splits == 1):
        return
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = query_row(in_tile, heads_reciprocal)
    is_row = row < num_rows
    dim = tl.arange(0, DIM)
    is_part = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    joined = joined_splits(
        partials,
        partial_stats,
        slot,
        num_splits,
        sinks,
        kv_head,
        kv_heads,
        heads_per_kv,
        has_sinks,
        in_tile,
        row,
        is_row,
        is_part,
        dim,
        HEAD_DIM,
        DIM,
        TILE,
        ROWS,
        STAGES,
    )
    offset = (in_tile + row * (kv_heads - 1) * heads_per_kv)[:, None] * HEAD_DIM + dim[None, :]
    out = attended + (token.to(tl.int64) * kv_heads + kv_head) * heads_per_kv * HEAD_DIM
    tl.store(out + offset, joined, mask=is_part)


@triton.jit(do_not_specialize=["kv_heads", "heads_per_kv", "heads_reciprocal", "has_sinks"])
def attention_codes_kernel(
    attended,  # F [N, heads, D]; read where a tile has one split
    partials,  # float32 [work_slots, kv_heads, TILE, D]
    partial_stats,  # float32 [work_slots, kv_heads, 2, TILE]
    plan,  # int32 [items, PLAN_WORDS]
    sinks,  # float32 [heads]; read only with has_sinks
    codes,  # out, float8_e4m3fn [N, heads, D]
    scale,  # float32 [1], of the codes
    kv_heads,
    heads_per_kv,
    heads_reciprocal,
    has_sinks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the tile per program
    STAGES: tl.constexpr,  # stages of the load pipeline
):
    """As above for every tile, with codes for the next GEMM. Grid: (kv_heads, tile_capacity, TILE / ROWS)."""
    kv_head = tl.program_id(0)
    _, token, num_rows, _, _, _ = load_range(plan, tl.program_id(1))
    slot, splits = load_place(plan, tl.program_id(1))
    _, num_splits = split_and_number(splits)
    if num_rows == 0:
        return
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = query_row(in_tile, heads_reciprocal)
    is_row = row < num_rows
    dim = tl.arange(0, DIM)
    is_part = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    offset = (in_tile + row * (kv_heads - 1) * heads_per_kv)[:, None] * HEAD_DIM + dim[None, :]
    offset += (token.to(tl.int64) * kv_heads + kv_head) * heads_per_kv * HEAD_DIM
    if num_splits == 1:
        value = tl.load(attended + offset, mask=is_part, other=0.0).to(tl.float32)
    else:
        value = joined_splits(
            partials,
            partial_stats,
            slot,
            num_splits,
            sinks,
            kv_head,
            kv_heads,
            heads_per_kv,
            has_sinks,
            in_tile,
            row,
            is_row,
            is_part,
            dim,
            HEAD_DIM,
            DIM,
            TILE,
            ROWS,
            STAGES,
        )
    value = value.to(attended.dtype.element_ty).to(tl.float32)  # rounded as if it had been stored
    tl.store(codes + offset, e4m3(value, tl.load(scale)).to(codes.dtype.element_ty), mask=is_part)


@triton.jit
def joined_splits(
    partials,
    partial_stats,
    slot,
    num_splits,
    sinks,
    kv_head,
    kv_heads,
    heads_per_kv,
    has_sinks,
    in_tile,  # [ROWS]
    row,
    is_row,
    is_part,  # [ROWS, DIM]
    dim,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [ROWS, DIM]."""
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
    return output / divisor[:, None]
