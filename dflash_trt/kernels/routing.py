"""Routing of a mixture of experts in one launch: each row's choice, and rows sorted by expert.

`tests/kernels/reference_experts.py` defines the results in PyTorch. An *entry* is one choice of one row, numbered row *
num_chosen + choice. The entries of an expert, in order, are cut into tiles of TOKENS, so that the kernels of
`experts.py` need only the index of a tile. Only `num_here` experts from `first_expert` on have tiles.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

SOFTMAX_TOP_K, TOP_K_SOFTMAX, SIGMOID_TOP_K = 0, 1, 2  # KIND

_SOFTMAX_TOP_K, _TOP_K_SOFTMAX, _SIGMOID_TOP_K = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LOWEST = tl.constexpr(-3.0e38)  # finite: above what is chosen already, below every score
_HALF_LOWEST = tl.constexpr(-1.5e38)
_MIN_LOGIT = tl.constexpr(-80.0)  # input of a sigmoid, whose exponential must not overflow
_NEGLIGIBLE = tl.constexpr(1e-20)  # added to a sum of sigmoids, which may underflow


@triton.jit
def reset_ticket_kernel(ticket):  # out, int32 [1]
    """Clear a ticket in uninitialized memory. Grid: (1,)."""
    tl.store(ticket, 0)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "first_expert", "num_here"])
def routing_kernel(
    logits,  # F [N, num_experts]
    choice_bias,  # float32 [num_experts]: added for the choice alone; read only with HAS_BIAS
    expert_ids,  # out, int32 [N, num_chosen], best first
    weights,  # out, float32 [N, num_chosen], rounded to F
    order,  # out, int32 [N * num_chosen]: entries by expert
    tiles,  # out, int32 [3, num_tiles]: index of the expert (-1: none), first place in `order`, end
    ranks,  # int32 [N, num_chosen]: place among the entries of the same expert and program
    counts,  # int32 [programs + 1, EXPERTS]: entries per program and expert, then those before; last row: first places
    ticket,  # int32 [1]: zero between launches
    num_rows,
    num_tiles,
    first_expert,
    num_here,
    factor,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    KIND: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    num_groups: tl.constexpr,  # groups of equal size; the choice is from `num_chosen_groups` of them
    num_chosen_groups: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two >= num_experts
    GROUPS: tl.constexpr,  # power of two >= num_groups
    CHOSEN: tl.constexpr,  # power of two >= num_chosen
    ROWS: tl.constexpr,  # per program
    PROGRAMS: tl.constexpr,  # whose counts are added up at once
    TILES: tl.constexpr,  # described at once
    ENTRIES: tl.constexpr,  # sorted at once
    TOKENS: tl.constexpr,  # per tile
):
    """Grid: (ceil(N / ROWS),). The program that ends last sorts for all."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    scores, choice_scores = _scores(logits, choice_bias, rows, is_row, experts, is_expert, num_experts, KIND, HAS_BIAS)
    if num_groups > 1:
        group_of = experts // (num_experts // num_groups)
        choice_scores = _of_best_groups(choice_scores, experts, group_of, num_groups, num_chosen_groups, ROWS, GROUPS)
    chosen = tl.arange(0, CHOSEN)
    ids = tl.zeros((ROWS, CHOSEN), tl.int32)
    values = tl.zeros((ROWS, CHOSEN), tl.float32)
    is_chosen = tl.zeros((ROWS, EXPERTS), tl.int32)
    for choice in tl.static_range(num_chosen):
        best = tl.argmax(choice_scores, axis=1, tie_break_left=True)
        is_best = experts[None, :] == best[:, None]
        value = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        ids = tl.where(chosen[None, :] == choice, best[:, None], ids)
        values = tl.where(chosen[None, :] == choice, value[:, None], values)
        is_chosen = tl.where(is_best & is_row[:, None], 1, is_chosen)
        choice_scores = tl.where(is_best, float("-inf"), choice_scores)
    before = tl.cumsum(is_chosen, axis=0) - is_chosen
    tl.store(counts + program * EXPERTS + experts, tl.sum(is_chosen, axis=0))
    at = rows[:, None] * num_chosen + chosen[None, :]
    is_entry = is_row[:, None] & (chosen[None, :] < num_chosen)
    rank = tl.zeros((ROWS, CHOSEN), tl.int32)
    for choice in tl.static_range(num_chosen):
        expert = tl.sum(tl.where(chosen[None, :] == choice, ids, 0), axis=1)
        place = tl.sum(tl.where(experts[None, :] == expert[:, None], before, 0), axis=1)
        rank = tl.where(chosen[None, :] == choice, place[:, None], rank)
    values = _weights(values, chosen[None, :] < num_chosen, factor, KIND, NORMALIZES)
    tl.store(expert_ids + at, ids, mask=is_entry)
    tl.store(ranks + at, rank, mask=is_entry)
    tl.store(weights + at, values.to(logits.dtype.element_ty).to(tl.float32), mask=is_entry)

    tl.debug_barrier()  # every thread's stores come before the ticket
    num_programs = tl.num_programs(0)
    if tl.atomic_add(ticket, 1, sem="acq_rel") == num_programs - 1:
        tl.debug_barrier()
        tl.store(ticket, 0)
        _add_up(counts, tiles, num_programs, num_tiles, first_expert, num_here, EXPERTS, PROGRAMS, TILES, TOKENS)
        tl.debug_barrier()
        _sort(
            expert_ids, ranks, counts, order, num_rows * num_chosen, num_programs, num_chosen * ROWS, EXPERTS, ENTRIES
        )


@triton.jit
def _scores(
    logits, choice_bias, rows, is_row, experts, is_expert, num_experts, KIND: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Scores that become weights, and scores that decide: below every number for missing experts and NaN."""
    at = rows[:, None].to(tl.int64) * num_experts + experts[None, :]
    is_in = is_row[:, None] & is_expert[None, :]
    scores = tl.load(logits + at, mask=is_in, other=0.0).to(tl.float32)
    if KIND == _SOFTMAX_TOP_K:
        largest = _largest(scores, is_expert[None, :])
        scores = tl.where(is_expert[None, :], tl.exp(scores - largest[:, None]), 0.0)
        scores = scores / tl.sum(scores, axis=1)[:, None]
    if KIND == _SIGMOID_TOP_K:
        scores = 1.0 / (1.0 + tl.exp(-tl.where(scores < _MIN_LOGIT, _MIN_LOGIT, scores)))
    choice_scores = scores
    if HAS_BIAS:
        choice_scores += tl.load(choice_bias + experts, mask=is_expert, other=0.0)[None, :]
    # So that rows of NaN, too, go through experts that there are, each once. Their weights stay NaN.
    choice_scores = tl.where(choice_scores > _LOWEST, choice_scores, _LOWEST)
    return scores, tl.where(is_expert[None, :], choice_scores, float("-inf"))


@triton.jit
def _of_best_groups(
    choice_scores,  # float32 [ROWS, EXPERTS]
    experts,
    group_of,  # int32 [EXPERTS]
    num_groups: tl.constexpr,
    num_chosen_groups: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """`choice_scores` of the groups with the largest sums of their two best, and of no other."""
    groups = tl.arange(0, GROUPS)
    sums = tl.full((ROWS, GROUPS), float("-inf"), tl.float32)
    for group in tl.static_range(num_groups):
        here = tl.where((group_of == group)[None, :], choice_scores, float("-inf"))
        best = tl.argmax(here, axis=1, tie_break_left=True)
        others = tl.where(experts[None, :] == best[:, None], float("-inf"), here)
        best_two = tl.maximum(tl.max(here, axis=1), _HALF_LOWEST) + tl.maximum(tl.max(others, axis=1), _HALF_LOWEST)
        sums = tl.where(groups[None, :] == group, best_two[:, None], sums)
    is_open = group_of[None, :] < tl.zeros((ROWS, 1), tl.int32)
    for _ in tl.static_range(num_chosen_groups):
        best = tl.argmax(sums, axis=1, tie_break_left=True)
        is_open = is_open | (group_of[None, :] == best[:, None])
        sums = tl.where(groups[None, :] == best[:, None], float("-inf"), sums)
    return tl.where(is_open, choice_scores, float("-inf"))


@triton.jit
def _weights(values, is_chosen, factor, KIND: tl.constexpr, NORMALIZES: tl.constexpr):
    if KIND == _TOP_K_SOFTMAX:
        largest = _largest(values, is_chosen)
        values = tl.where(is_chosen, tl.exp(values - largest[:, None]), 0.0)
        return values / tl.sum(values, axis=1)[:, None]
    values = tl.where(is_chosen, values, 0.0)
    if NORMALIZES:
        total = tl.sum(values, axis=1)
        if KIND == _SIGMOID_TOP_K:
            total += _NEGLIGIBLE
        values = values / total[:, None]
    return values * factor


@triton.jit
def _largest(values, is_in):
    """The largest number of each row; 0 without one."""
    largest = tl.max(tl.where(is_in & (values == values), values, _LOWEST), axis=1)
    return tl.where(largest == _LOWEST, 0.0, largest)


@triton.jit
def _add_up(
    counts,
    tiles,
    num_programs,
    num_tiles,
    first_expert,
    num_here,
    EXPERTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Turn counts into the entries of each expert before a program's, and describe the tiles."""
    experts = tl.arange(0, EXPERTS)
    totals = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, num_programs, PROGRAMS):
        programs = start + tl.arange(0, PROGRAMS)
        at = programs[:, None] * EXPERTS + experts[None, :]
        is_in = (programs < num_programs)[:, None]
        here = tl.load(counts + at, mask=is_in, other=0)
        tl.store(counts + at, totals[None, :] + tl.cumsum(here, axis=0) - here, mask=is_in)
        totals += tl.sum(here, axis=0)
    first_places = tl.cumsum(totals, axis=0) - totals
    tl.store(counts + num_programs * EXPERTS + experts, first_places)
    indices = experts - first_expert
    expert_tiles = tl.where((indices >= 0) & (indices < num_here), (totals + TOKENS - 1) // TOKENS, 0)
    end_tiles = tl.cumsum(expert_tiles, axis=0)
    for start in range(0, num_tiles, TILES):
        here = start + tl.arange(0, TILES)
        is_mine = (here[:, None] >= (end_tiles - expert_tiles)[None, :]) & (here[:, None] < end_tiles[None, :])
        expert = tl.max(tl.where(is_mine, indices[None, :], -1), axis=1)
        offset = (here[:, None] - (end_tiles - expert_tiles)[None, :]) * TOKENS
        first = tl.sum(tl.where(is_mine, first_places[None, :] + offset, 0), axis=1)
        end = tl.sum(tl.where(is_mine, (first_places + totals)[None, :], 0), axis=1)
        tl.store(tiles + here, expert, mask=here < num_tiles)
        tl.store(tiles + num_tiles + here, first, mask=here < num_tiles)
        tl.store(tiles + 2 * num_tiles + here, tl.minimum(end, first + TOKENS), mask=here < num_tiles)


@triton.jit
def _sort(
    expert_ids,
    ranks,
    counts,
    order,
    num_entries,
    num_programs,
    entries_per_program,
    EXPERTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Sort entries by expert, then by program, then by their order in the program."""
    for start in range(0, num_entries, ENTRIES):
        entries = start + tl.arange(0, ENTRIES)
        is_in = entries < num_entries
        expert = tl.load(expert_ids + entries, mask=is_in, other=0)
        place = tl.load(ranks + entries, mask=is_in, other=0)
        place += tl.load(counts + entries // entries_per_program * EXPERTS + expert, mask=is_in, other=0)
        place += tl.load(counts + num_programs * EXPERTS + expert, mask=is_in, other=0)
        tl.store(order + place, entries, mask=is_in)
