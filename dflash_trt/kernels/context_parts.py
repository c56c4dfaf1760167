"""Decode context parallelism over latents: each rank attends with the heads of all ranks to the positions it keeps.

Position p is on rank p & (ranks - 1), as the (p >> part_shift)-th one there. The last position that a row sees is
another on each rank, so each row is a request of its own for latent_attention.py. What it sums up goes to the rank of
its head, together with a logarithm by which the parts of all ranks are joined.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import load_place, load_range, split_and_number
from dflash_trt.kernels.attention_reduction import joined_splits
from dflash_trt.kernels.latent_attention import is_direct, log_sum
from dflash_trt.kernels.rope_and_pages import request_of

_SIZES = ["part", "part_shift", "first_row", "min_direct_rows", "num_requests", "pages_per_request"]


@triton.jit(do_not_specialize=_SIZES)
def own_rows_kernel(
    positions,  # int32 [N]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    page_table,  # int32 [R, pages_per_request]
    own_offsets,  # out, int32 [n + 1]
    own_lens,  # out, int32 [n]: positions here before the last that the row sees; -1 if it sees none
    own_pages,  # out, int32 [n, pages_per_request]
    part,  # this rank
    part_shift,
    first_row,
    min_direct_rows,  # rows that `is_direct` names see none
    num_requests,
    pages_per_request,
    REQUESTS: tl.constexpr,
    PAGES: tl.constexpr,  # copied at once
):
    """The n rows of a step from `first_row` on as requests of one row each. Grid: (n,)."""
    own = tl.program_id(0)
    row = first_row + own
    num_own = tl.maximum(tl.load(token_offsets + num_requests) - first_row, 0)
    tl.store(own_offsets + own, tl.minimum(own, num_own))
    if own == tl.num_programs(0) - 1:
        tl.store(own_offsets + own + 1, tl.minimum(own + 1, num_own))
    request = request_of(row, token_offsets, num_requests, REQUESTS)
    if request >= num_requests:
        tl.store(own_lens + own, 0)
        return
    own_len = (tl.load(positions + row) - part) >> part_shift
    if is_direct(request, token_offsets, context_lens, min_direct_rows):
        own_len = -1
    tl.store(own_lens + own, own_len)
    table = page_table + request.to(tl.int64) * pages_per_request
    for first in range(0, pages_per_request, PAGES):
        page = first + tl.arange(0, PAGES)
        found = tl.load(table + page, mask=page < pages_per_request, other=0)
        tl.store(own_pages + own.to(tl.int64) * pages_per_request + page, found, mask=page < pages_per_request)


@triton.jit(do_not_specialize=["num_rows", "groups", "group_heads", "rank_heads"])
def part_rows_kernel(
    attended,  # F [N, heads, HEAD_DIM]; read where a tile has one split
    log_sums,  # float32 [N, heads]; likewise
    partials,  # float32 [work_slots, groups, TILE, HEAD_DIM]
    partial_stats,  # float32 [work_slots, groups, 2, TILE]
    plan,  # int32 [items, PLAN_WORDS]
    sent,  # out, F [ranks, N, rank_heads, HEAD_DIM + 4 bytes]
    sent_logs,  # the same memory as float32: a row's last word is its logarithm
    num_rows,  # N
    groups,
    group_heads,  # ranks * rank_heads = groups * group_heads
    rank_heads,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # padded to a power of two
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of the tile per program
    STAGES: tl.constexpr,  # stages of the load pipeline
):
    """Join the splits of each tile, and put its rows where their rank reads them.

    Grid: (groups, tile_capacity, TILE / ROWS).
    """
    group = tl.program_id(0)
    _, token, tile_rows, _, _, _ = load_range(plan, tl.program_id(1))
    if tile_rows == 0:
        return
    slot, splits = load_place(plan, tl.program_id(1))
    _, num_splits = split_and_number(splits)
    in_tile = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = in_tile < tile_rows * group_heads
    dim = tl.arange(0, DIM)
    is_part = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    place = ((token * groups + group) * group_heads).to(tl.int64) + in_tile  # among the heads of all rows
    if num_splits == 1:
        value = tl.load(attended + place[:, None] * HEAD_DIM + dim[None, :], mask=is_part, other=0.0).to(tl.float32)
        logs = tl.load(log_sums + place, mask=is_row, other=float("-inf"))
    else:
        value, maximum, total = joined_splits(
            (partials, partial_stats),
            (slot, num_splits),
            (partial_stats, 0),
            (group, groups, TILE),
            (in_tile, in_tile, is_row, is_part),
            HEAD_DIM,
            DIM,
            TILE,
            ROWS,
            STAGES,
        )
        logs = log_sum(maximum, tl.where(maximum == float("-inf"), 0.0, total))
    heads = groups * group_heads
    row, head = place // heads, place % heads
    out = ((head // rank_heads) * num_rows + row) * rank_heads + head % rank_heads
    words: tl.constexpr = 4 // (sent.dtype.element_ty.primitive_bitwidth // 8)  # elements of a logarithm
    sent_row: tl.constexpr = HEAD_DIM + words
    tl.store(sent + out[:, None] * sent_row + dim[None, :], value.to(sent.dtype.element_ty), mask=is_part)
    tl.store(sent_logs + out * (sent_row // words) + sent_row // words - 1, logs, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "rank_heads", "num_requests"])
def join_parts_kernel(
    parts,  # F [RANKS, N, rank_heads, HEAD_DIM + 4 bytes], one rank's after another
    part_logs,  # the same memory as float32
    attended,  # out, F [N, rank_heads, HEAD_DIM]; zeros for rows of no request
    token_offsets,  # int32 [R + 1]
    num_rows,
    rank_heads,
    num_requests,
    RANKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # padded to a power of two
):
    """The sums over the positions of all ranks, in the order of the ranks. Grid: (N, rank_heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    out = (row * rank_heads + head).to(tl.int64)
    words: tl.constexpr = 4 // (parts.dtype.element_ty.primitive_bitwidth // 8)
    part_row: tl.constexpr = HEAD_DIM + words
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    joined = tl.zeros([DIM], tl.float32)
    if row < tl.load(token_offsets + num_requests):
        for rank in tl.static_range(RANKS):
            place = (rank * num_rows).to(tl.int64) * rank_heads + out
            log = tl.load(part_logs + place * (part_row // words) + part_row // words - 1 + tl.zeros([1], tl.int32))
            part = tl.load(parts + place * part_row + dim, mask=is_dim, other=0.0).to(tl.float32)
            new_maximum = tl.maximum(maximum, log)
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            decay, weight = tl.exp2(maximum - shift), tl.exp2(log - shift)
            joined = joined * decay + part * weight
            total = total * decay + weight
            maximum = new_maximum
        joined = joined / tl.where(total == 0.0, 1.0, total)
    tl.store(attended + out * HEAD_DIM + dim, joined.to(attended.dtype.element_ty), mask=is_dim)
