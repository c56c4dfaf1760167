"""The tokens of a DFlash2 block: the most likely of every slot, and the selection from the anchor on.

`backends/torch/dflash2.py` defines the results.

    tile_candidates   [rows, tiles]  the `TOP_K` largest logits of each tile
    merge_candidates  [rows]         the `TOP_K` largest of a row, and their tokens
    walk              [requests]     slot by slot the candidate that best follows the previous one

A logit and its token are one integer (`sampling_rows.py`). The convolution over the slots is in float32 and rounded
once, when stored. Launching is in `selector_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.argmax import topk_probs_of
from dflash_trt.kernels.philox import DRAFTS, noise_of_tokens
from dflash_trt.kernels.sampling_rows import NO_RANKING, logit_and_token, ranking_of


@triton.jit
def tile_candidates_kernel(
    logits,  # F [rows, vocab_size]
    tile_rankings,  # out, int64 [rows, tiles, TOP_K]
    vocab_size,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    tokens = tile * TILE + tl.arange(0, TILE)
    start = logits + row.to(tl.int64) * vocab_size
    x = tl.load(start + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    rankings = tl.where(tokens < vocab_size, ranking_of(x, tokens), NO_RANKING)
    best_of_tile = tile_rankings + (row.to(tl.int64) * tl.num_programs(1) + tile) * TOP_K
    for place in range(TOP_K):
        best = tl.max(rankings, axis=0)
        tl.store(best_of_tile + place, best)
        rankings = tl.where(rankings == best, NO_RANKING, rankings)


@triton.jit(do_not_specialize=["num_rankings"])
def merge_candidates_kernel(
    tile_rankings,  # int64 [rows, num_rankings]
    candidates,  # out, int32 [rows, TOP_K], best first
    candidate_logits,  # out, float32 [rows, TOP_K]
    num_rankings,
    TOP_K: tl.constexpr,
    RANKINGS: tl.constexpr,  # power of two >= num_rankings
):
    row = tl.program_id(0)
    at = tl.arange(0, RANKINGS)
    rankings = tl.load(tile_rankings + row.to(tl.int64) * num_rankings + at, mask=at < num_rankings, other=NO_RANKING)
    for place in range(TOP_K):
        best = tl.max(rankings, axis=0)
        logit, token = logit_and_token(best)
        tl.store(candidates + row * TOP_K + place, token)
        tl.store(candidate_logits + row * TOP_K + place, logit)
        rankings = tl.where(rankings == best, NO_RANKING, rankings)


@triton.jit(do_not_specialize=["num_slots"])
def walk_kernel(
    candidates,  # int32 [rows, TOP_K]
    candidate_logits,  # float32 [rows, TOP_K]
    hidden,  # F [rows, rank]
    predecessor,  # F [vocab_size, rank]
    successor,  # F [vocab_size, rank]
    bonus_tokens,  # int32 [R]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    next_context_lens,  # int32 [R], position of the bonus token, the block's slot 0
    token_ids,  # out, int32 [rows]
    draft_topk_probs,  # out, float32 [rows, TOP_K]; 0 for requests without rejection sampling
    num_slots,  # rows of a request, K
    rank,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,  # power of two >= TOP_K
    RANKS: tl.constexpr,  # codebook ranks, read at once
):
    """Scores are in float32. Sampled requests get the noise of the stream that they draw drafts with."""
    request = tl.program_id(0)
    degree = tl.load(temperature + request)
    stream = tl.load(draft_stream + request)
    start = tl.load(next_context_lens + request)
    previous = tl.load(bonus_tokens + request)
    place = tl.arange(0, CANDIDATES)
    is_candidate = place < TOP_K
    for slot in range(num_slots):
        row = request * num_slots + slot
        tokens = tl.load(candidates + row * TOP_K + place, mask=is_candidate, other=0)
        scores = tl.load(candidate_logits + row * TOP_K + place, mask=is_candidate, other=float("-inf"))
        for first in range(0, rank, RANKS):
            column = first + tl.arange(0, RANKS)
            is_in = column < rank
            query = tl.load(predecessor + previous.to(tl.int64) * rank + column, mask=is_in, other=0.0).to(tl.float32)
            query *= tl.load(hidden + row.to(tl.int64) * rank + column, mask=is_in, other=0.0).to(tl.float32)
            at = tokens.to(tl.int64)[:, None] * rank + column[None, :]
            keys = tl.load(successor + at, mask=is_candidate[:, None] & is_in[None, :], other=0.0).to(tl.float32)
            scores += tl.sum(keys * query[None, :], axis=1)
        own = tl.zeros([CANDIDATES], tl.float32)
        if degree > 0:
            if stream == DRAFTS:
                own = topk_probs_of(scores, is_candidate, degree)
            scores += degree * noise_of_tokens(tl.load(seed + request), start + 1 + slot, stream, tokens)
        tl.store(draft_topk_probs + row * TOP_K + place, own, mask=is_candidate)
        scores = tl.where(scores == scores, scores, float("-inf"))
        is_best = is_candidate & (scores == tl.max(scores, axis=0))
        best = tl.minimum(tl.min(tl.where(is_best, place, TOP_K), axis=0), TOP_K - 1)
        previous = tl.sum(tl.where(place == best, tokens, 0), axis=0)
        tl.store(token_ids + row, previous)


# The filters of one side of a sublayer begin anywhere in a row of both.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["filters"])
def block_conv_kernel(
    x,  # F [R * num_slots, hidden_size]
    filters,  # F, R * num_slots rows of [TAPS, groups], filter_stride apart
    base,  # F [TAPS, hidden_size]
    out,  # F [R * num_slots, hidden_size]
    filter_stride,
    num_slots,
    hidden_size,
    GROUP_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R * num_slots, ceil(hidden_size / BLOCK))."""
    row = tl.program_id(0)
    slot = row % num_slots
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = channels < hidden_size
    own_filters = filters + row.to(tl.int64) * filter_stride + channels // GROUP_SIZE
    own_row = x + row.to(tl.int64) * hidden_size + channels
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        if tap <= slot:  # zeros stand before slot 0
            coefficient = tl.load(base + tap * hidden_size + channels, mask=is_in, other=0.0).to(tl.float32)
            group = own_filters + tap * (hidden_size // GROUP_SIZE)
            coefficient += tl.load(group, mask=is_in, other=0.0).to(tl.float32)
            total += coefficient * tl.load(own_row - tap * hidden_size, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * hidden_size + channels, total.to(out.dtype.element_ty), mask=is_in)
