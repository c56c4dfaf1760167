"""Softmax of the attention kernels: online over blocks of keys, and joined over the splits of a tile.

The kernels here do the latter; tiles without splits are finished already.

Names in grid expressions are as in attention.py.
"""

# mypy: ignore-errors
# ruff: noqa: N803, SIM102  (constants of a kernel are upper case; it takes branches one by one)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import SIZES, load_place, load_range, plan_item, query_row, split_and_number
from dflash_trt.kernels.row_codes import e4m3


@triton.jit(do_not_specialize=SIZES)
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
    _, num_splits = split_and_number(splits)
    if (num_rows == 0) | (num_splits == 1):
        return
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = query_row(in_tile, heads_reciprocal)
    is_row = row < num_rows
    dim = tl.arange(0, DIM)
    is_part = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    heads = (kv_head, kv_heads, heads_per_kv)
    rows = (in_tile, row, is_row, is_part)
    joined, _maximum, _divisor = joined_splits(
        (partials, partial_stats),
        (slot, num_splits),
        (sinks, has_sinks),
        heads,
        rows,
        HEAD_DIM,
        DIM,
        TILE,
        ROWS,
        STAGES,
    )
    offset = (in_tile + row * (kv_heads - 1) * heads_per_kv)[:, None] * HEAD_DIM + dim[None, :]
    out = attended + (token.to(tl.int64) * kv_heads + kv_head) * heads_per_kv * HEAD_DIM
    tl.store(out + offset, joined, mask=is_part)


@triton.jit(do_not_specialize=SIZES)
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
        heads = (kv_head, kv_heads, heads_per_kv)
        rows = (in_tile, row, is_row, is_part)
        value, _maximum, _divisor = joined_splits(
            (partials, partial_stats),
            (slot, num_splits),
            (sinks, has_sinks),
            heads,
            rows,
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
    partial_results,  # partials, partial_stats
    splits,  # slot of the first, their number
    sinks_of_heads,  # sinks, has_sinks
    heads,  # kv_head, kv_heads, heads_per_kv
    rows,  # in_tile [ROWS], row, is_row, is_part [ROWS, DIM]
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [ROWS, DIM], and of each row the maximum of the scores and the divisor for it."""
    partials, partial_stats = partial_results
    slot, num_splits = splits
    sinks, has_sinks = sinks_of_heads
    kv_head, kv_heads, heads_per_kv = heads
    in_tile, row, is_row, is_part = rows
    dim = tl.arange(0, DIM)
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
    return output / divisor[:, None], maximum, divisor


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(q, k, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """q [TILE, D] times k [KEYS, D], and the factor that takes them to scores in base 2."""
    products = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (1 + exp(2 x))
        doubled = tl.exp2(products * (scale * (2.0 * LOG2_E) / softcap))
        products = 1.0 - 2.0 / (1.0 + doubled)
        scale = softcap
    return products, scale * LOG2_E


@triton.jit
def absorb(products, factor, v, maximum, total, output):
    """Online softmax: take in the scores of some keys, -inf where hidden, and their values."""
    new_maximum = tl.maximum(maximum, tl.max(products, 1) * factor)
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row that has seen no key yet
    weights = tl.exp2(products * factor - shift[:, None])
    decay = tl.exp2(maximum - shift)
    total = total * decay + tl.sum(weights, 1)
    output = tl.dot(weights.to(v.dtype), v, output * decay[:, None], input_precision="tf32x3")
    return new_maximum, total, output


@triton.jit
def divisor_of(maximum, total, sinks, in_tile, row, heads_per_kv, has_sinks):
    """Divisor of the sum of values: the sum of weights plus the sink's, which has no value.

    has_sinks is 0 or 1. The sink comes last, so that no split of the keys changes the order of the sum.
    """
    head = in_tile - row * heads_per_kv
    sink = tl.load(sinks + head, mask=head < heads_per_kv * has_sinks, other=float("-inf"))
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total += tl.exp2(sink * LOG2_E - shift)
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def load_queries(rows, is_dim, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(rows)
    return tl.load(rows, mask=is_dim, other=0.0)


@triton.jit
def for_pages(queries, pages):
    """Queries in the products' type: FP8 numbers are exact in float16, and convert in few instructions."""
    if pages.dtype.element_ty == tl.float8e4nv:
        if queries.dtype == tl.bfloat16:
            queries = queries.to(tl.float16)
    return queries
