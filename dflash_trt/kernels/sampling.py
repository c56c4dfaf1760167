"""Sampling on a GPU, for any vocabulary size and without a sort: nine small launches, no host between.

`reference_sampling.py` is the same arithmetic in PyTorch. Probabilities are compared and summed in fixed point
(e^(score - largest) in units of 2^-40, int64), so that no result depends on how a row was cut into tiles. A token is
sampled with the noise of `philox.py`; `sampling_rows.py` reads rows and searches them. This file knows nothing of
requests beyond `core/step_spec.py`; launching is in `sampling_launch.py`.

    tile_statistics  [rows, tiles]  largest logit and sums of exponentials of each tile, maxima of its pieces
    row_bounds       [rows]         the row's maximum; greedy rows are done, and rows that give no token (NaN, see
                                    `core/step_spec.py`); a floor under every token that top_k/top_p keep
    collect          [rows, tiles]  the mass of each tile; tokens above the floor go to the row's list, in any order
    row_threshold    [rows]         the smallest exponential that top_k and top_p keep, by histograms of the list
    kept_mass        [rows, tiles]  for rejection sampling of drafts, and
    test_drafts      [rows]         which of them are accepted: `rejection.py`
    tile_draw        [rows, tiles]  the kept token of each tile whose score is largest with its noise
    draw             [rows]         the token of the row
    accept           [requests]     the longest prefix of candidates that equals the sampled tokens
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import TOKENS, noise_of_range
from dflash_trt.kernels.rejection import ACCEPTED, REJECTED, UNTESTED, first_topk, without_topk
from dflash_trt.kernels.sampling_rows import (
    FILTERED,
    GREEDY,
    RANDOM,
    exponentials,
    is_kept,
    kth_piece,
    load_logits,
    mass_larger_than,
    mass_of,
    search_threshold,
)

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["width"])
def tile_statistics_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    top_k,  # int32 [R]
    tile_max,  # float32 [rows, tiles], of the logits
    tile_argmax,  # int32 [rows, tiles], the first largest
    tile_sum,  # float32 [rows, tiles], of e^(logit - tile_max)
    tile_scaled_sum,  # float32 [rows, tiles], the same at the temperature; random rows only
    piece_max,  # float32 [rows, tiles * PIECES], rows with top_k only
    vocab_size,
    width,  # rows of a request, K + 1
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(1)
    request = row // width
    offsets = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits, row, offsets, vocab_size)
    numbers = tl.where(x == x, x, float("-inf"))  # NaN is seen in the sums
    largest = tl.max(numbers, axis=0)
    index = tl.min(tl.where((x == largest) & (offsets < vocab_size), offsets, _NO_INDEX), axis=0)
    anchor = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)  # a tile of -inf sums to 0, one with +inf to +inf
    at = row * num_tiles + tile
    tl.store(tile_max + at, largest)
    tl.store(tile_argmax + at, index)
    tl.store(tile_sum + at, tl.sum(tl.exp(x - anchor), axis=0))
    degree = tl.load(temperature + request)
    if degree > 0:
        tl.store(tile_scaled_sum + at, tl.sum(tl.exp(tl.div_rn(x - anchor, degree)), axis=0))
        if tl.load(top_k + request) > 0:
            pieces = tl.max(tl.reshape(numbers, (PIECES, TILE // PIECES)), axis=1)
            tl.store(piece_max + at * PIECES + tl.arange(0, PIECES), pieces)


@triton.jit(do_not_specialize=["width", "num_tiles"])
def row_bounds_kernel(
    temperature,  # float32 [R]
    top_k,  # int32 [R]
    top_p,  # float32 [R]
    min_p,  # float32 [R]
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles]
    tile_sum,  # float32 [rows, tiles]
    tile_scaled_sum,  # float32 [rows, tiles]
    piece_max,  # float32 [rows, tiles * PIECES]
    row_max,  # float32 [rows], 0 where it is infinite
    row_log_sum,  # float32 [rows], logsumexp of the logits; NaN where it is not finite
    row_mode,  # int32 [rows]
    row_floor,  # float32 [rows], exponentials below it are not kept by top_k and top_p
    row_threshold,  # float32 [rows], exponentials from it on are kept; FILTERED rows get theirs later
    list_count,  # int32 [rows], set to 0
    emitted_tokens,  # int32 [rows], greedy rows only
    emitted_logprobs,  # float32 [rows], greedy rows only
    vocab_size,
    width,
    num_tiles,
    TILES: tl.constexpr,  # power of two >= num_tiles
    PIECES: tl.constexpr,
):
    row = tl.program_id(0)
    request = row // width
    tiles = tl.arange(0, TILES)
    at = row * num_tiles + tiles
    maxima = tl.load(tile_max + at, mask=tiles < num_tiles, other=float("-inf"))
    indices = tl.load(tile_argmax + at, mask=tiles < num_tiles, other=_NO_INDEX)
    sums = tl.load(tile_sum + at, mask=tiles < num_tiles, other=0.0)
    largest = tl.max(maxima, axis=0)
    index = tl.min(tl.where(maxima == largest, indices, _NO_INDEX), axis=0)
    anchor = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    total = tl.sum(sums * tl.exp(maxima - anchor), axis=0)
    has_tokens = (total > 0) & (total < float("inf"))  # neither NaN nor +inf among the logits, nor all of them -inf
    log_sum = tl.where(has_tokens, anchor + tl.log(tl.where(has_tokens, total, 1.0)), float("nan"))
    tl.store(row_max + row, anchor)
    tl.store(row_log_sum + row, log_sum)
    tl.store(list_count + row, 0)
    degree = tl.load(temperature + request)
    if (degree > 0) & has_tokens:
        k, p = tl.load(top_k + request), tl.load(top_p + request)
        has_top_k = (k > 0) & (k < vocab_size)
        floor = 0.0
        if p < 1:
            # Tokens up to this floor have together at most (1 - p) of the mass, so the prefix ends before them. What
            # top_k leaves is not known yet, but it is at least the 1.0 of the most likely token.
            scaled_sums = tl.load(tile_scaled_sum + at, mask=tiles < num_tiles, other=0.0)
            scaled = tl.exp(tl.div_rn(maxima - anchor, degree))
            scaled_total = tl.where(has_top_k, 1.0, tl.sum(scaled_sums * scaled, axis=0))
            floor = 0.999 * (1.0 - p) * scaled_total / vocab_size
        if has_top_k & (k <= num_tiles * PIECES):
            floor = tl.maximum(
                floor, kth_piece(piece_max + row * num_tiles * PIECES, k, anchor, degree, num_tiles, TILES, PIECES)
            )
        tl.store(row_mode + row, tl.where(has_top_k | (p < 1), FILTERED, RANDOM))
        tl.store(row_floor + row, floor)
        tl.store(row_threshold + row, tl.minimum(tl.load(min_p + request), 1.0))
    else:
        token = tl.minimum(index, vocab_size - 1)
        tl.store(row_mode + row, GREEDY)
        tl.store(emitted_tokens + row, token)
        tl.store(emitted_logprobs + row, largest - log_sum)


@triton.jit(do_not_specialize=["width"])
def collect_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    row_max,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_floor,  # float32 [rows]
    list_values,  # float32 [rows, LIST_CAPACITY], exponentials
    list_count,  # int32 [rows], may pass the capacity; values beyond it are dropped
    tile_mass,  # int64 [rows, tiles]
    vocab_size,
    width,
    TILE: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(row_mode + row) == FILTERED:
        offsets = tile * TILE + tl.arange(0, TILE)
        degree = tl.load(temperature + row // width)
        e = exponentials(logits, row, offsets, vocab_size, tl.load(row_max + row), degree)
        is_listed = (e > 0) & (e >= tl.load(row_floor + row))
        slots = tl.cumsum(is_listed.to(tl.int32), axis=0)
        start = tl.atomic_add(list_count + row, tl.sum(is_listed.to(tl.int32), axis=0))
        slots += start - 1
        tl.store(list_values + row * LIST_CAPACITY + slots, e, mask=is_listed & (slots < LIST_CAPACITY))
        tl.store(tile_mass + row * tl.num_programs(1) + tile, tl.sum(mass_of(e), axis=0))


@triton.jit(do_not_specialize=["width", "num_tiles"])
def row_threshold_kernel(
    logits,  # F [rows, vocab_size], for rows whose list overflowed
    temperature,  # float32 [R]
    top_k,  # int32 [R]
    top_p,  # float32 [R]
    row_max,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_threshold,  # float32 [rows], raised from min_p to what top_k and top_p keep
    list_values,  # float32 [rows, LIST_CAPACITY]
    list_count,  # int32 [rows]
    bins,  # int64 [rows, BINS]
    tile_mass,  # int64 [rows, tiles]
    vocab_size,
    width,
    num_tiles,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST_CAPACITY: tl.constexpr,
    BINS: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(row_mode + row) == FILTERED:
        request = row // width
        k, p = tl.load(top_k + request), tl.load(top_p + request)
        degree, largest = tl.load(temperature + request), tl.load(row_max + row)
        count = tl.load(list_count + row)
        tiles = tl.arange(0, TILES)
        masses = tl.load(tile_mass + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
        total = tl.sum(masses, axis=0)
        found = tl.full((), 0, tl.int32)  # bits of the smallest exponential kept so far
        if (k > 0) & (k < vocab_size):
            # the largest value that at least k tokens reach
            found, num_above = search_threshold(
                logits, list_values, bins, row, count, k, largest, degree, vocab_size, False, CHUNK, LIST_CAPACITY, BINS
            )
            if (found > 0) & (p < 1):
                # k tokens by falling probability: of those tied at the end, as many as there is room for
                mass_above = mass_larger_than(
                    logits, list_values, row, count, found, largest, degree, vocab_size, CHUNK, LIST_CAPACITY
                )
                total = mass_above + (k - num_above) * mass_of(found.to(tl.float32, bitcast=True))
        if p < 1:
            # the largest value that top_p of the mass reaches: those above it have less
            limit = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            found, _ = search_threshold(
                logits,
                list_values,
                bins,
                row,
                count,
                limit,
                largest,
                degree,
                vocab_size,
                True,
                CHUNK,
                LIST_CAPACITY,
                BINS,
            )
        threshold = tl.maximum(found.to(tl.float32, bitcast=True), tl.load(row_threshold + row))
        tl.store(row_threshold + row, threshold)


@triton.jit(do_not_specialize=["width", "draft_topk"])
def tile_draw_kernel(
    logits,  # F [rows, vocab_size]
    token_ids,  # int32 [T]
    positions,  # int32 [T]
    logit_rows,  # int32 [rows]
    draft_topk_ids,  # int32 [R, K * draft_topk]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    row_max,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_threshold,  # float32 [rows]
    row_outcome,  # int32 [rows]
    tile_max,  # float32 [rows, tiles], of the logits
    tile_score,  # float32 [rows, tiles], the largest with its noise among the kept tokens
    tile_token,  # int32 [rows, tiles], the first one that has it
    vocab_size,
    width,
    draft_topk,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    outcome = tl.load(row_outcome + row)
    if (tl.load(row_mode + row) != GREEDY) & (outcome != ACCEPTED):
        at = row * tl.num_programs(1) + tile
        degree, largest = tl.load(temperature + row // width), tl.load(row_max + row)
        threshold = tl.load(row_threshold + row)
        score, token = float("-inf"), _NO_INDEX
        if tl.exp(tl.div_rn(tl.load(tile_max + at) - largest, degree)) >= threshold:
            offsets = tile * TILE + tl.arange(0, TILE)
            x = load_logits(logits, row, offsets, vocab_size) - largest
            is_in = is_kept(tl.exp(tl.div_rn(x, degree)), threshold)
            token_row = tl.load(logit_rows + row)
            position = tl.load(positions + token_row) + 1
            noise = noise_of_range(tl.load(seed + row // width), position, TOKENS, tile * TILE, TILE)
            scores = tl.where(is_in, x + degree * noise, float("-inf"))
            if outcome == REJECTED:
                own = draft_topk_ids + first_topk(row, width, draft_topk)
                scores = without_topk(scores, tile * TILE, own, tl.load(token_ids + token_row + 1), draft_topk, TILE)
            score = tl.max(scores, axis=0)
            token = tl.min(tl.where((scores == score) & is_in, offsets, _NO_INDEX), axis=0)
        tl.store(tile_score + at, score)
        tl.store(tile_token + at, token)


@triton.jit(do_not_specialize=["width", "num_tiles"])
def draw_kernel(
    logits,  # F [rows, vocab_size]
    row_log_sum,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_outcome,  # int32 [rows]
    row_score,  # float32 [rows], of tested rows
    row_token,  # int32 [rows]
    tile_score,  # float32 [rows, tiles]
    tile_token,  # int32 [rows, tiles]
    emitted_tokens,  # int32 [rows], random rows only
    emitted_logprobs,  # float32 [rows], random rows only
    vocab_size,
    num_tiles,
    TILES: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(row_mode + row) != GREEDY:
        tiles = tl.arange(0, TILES)
        at = row * num_tiles + tiles
        scores = tl.load(tile_score + at, mask=tiles < num_tiles, other=float("-inf"))
        tokens = tl.load(tile_token + at, mask=tiles < num_tiles, other=_NO_INDEX)
        score = tl.max(scores, axis=0)
        token = tl.min(tl.where(scores == score, tokens, _NO_INDEX), axis=0)
        outcome = tl.load(row_outcome + row)
        if outcome != UNTESTED:
            own, own_score = tl.load(row_token + row), tl.load(row_score + row)
            is_own = (outcome == ACCEPTED) | (own_score > score) | ((own_score == score) & (own < token))
            token = tl.where(is_own, own, token)
        token = tl.minimum(token, vocab_size - 1)
        logit = tl.load(logits + row.to(tl.int64) * vocab_size + token).to(tl.float32)
        tl.store(emitted_tokens + row, token)
        tl.store(emitted_logprobs + row, logit - tl.load(row_log_sum + row))


@triton.jit(do_not_specialize=["width"])
def accept_kernel(
    token_ids,  # int32 [T]
    token_offsets,  # int32 [R + 1]
    context_lens,  # int32 [R]
    logit_rows,  # int32 [R, width]
    num_candidates,  # int32 [R]
    emitted_tokens,  # int32 [R, width]
    num_accepted,  # int32 [R]
    bonus_tokens,  # int32 [R]
    next_context_lens,  # int32 [R]
    width,
    WIDTH: tl.constexpr,  # power of two >= width
):
    request = tl.program_id(0)
    slots = tl.arange(0, WIDTH)
    candidates = tl.load(num_candidates + request)
    is_candidate = (slots < candidates) & (slots < width - 1)
    rows = tl.load(logit_rows + request * width + slots, mask=is_candidate, other=0)
    drafts = tl.load(token_ids + rows + 1, mask=is_candidate, other=0)
    sampled = tl.load(emitted_tokens + request * width + slots, mask=slots < width, other=0)
    agrees = is_candidate & (drafts == sampled)
    accepted = tl.min(tl.where(agrees, WIDTH, slots), axis=0)  # the first slot that does not agree
    bonus = tl.sum(tl.where(slots == accepted, sampled, 0), axis=0)
    given = tl.load(token_offsets + request + 1) - tl.load(token_offsets + request)
    tl.store(num_accepted + request, accepted)
    tl.store(bonus_tokens + request, bonus)
    tl.store(next_context_lens + request, tl.load(context_lens + request) + given - candidates + accepted)
