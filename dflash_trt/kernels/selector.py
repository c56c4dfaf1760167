"""The tokens of a DFlash2 block: the likeliest of every slot, and the walk through them from the anchor.

`backends/torch/dflash2.py` defines the results.

    tile_candidates   [rows, tiles]  the `TOP_K` largest logits of each tile
    merge_candidates  [rows]         the `TOP_K` largest of a row, and whose they are
    walk              [requests]     slot by slot the candidate that fits best behind the one before

A logit and its token are one integer, a *ranking*: it is larger for a larger logit, and of equal logits for the smaller
token, so that one maximum finds both and no two are equal. NaN is below every number. Launching is in
`selector_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import noise_of_tokens

_NO_RANKING = tl.constexpr(-(1 << 63))
_MAX_INT32 = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ranking_of(x, token):
    """int64, of a float32 logit and a token."""
    x = tl.where(x == x, x, float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)  # the zeros are equal
    return (_turned(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (token ^ _MAX_INT32).to(tl.int64)


@triton.jit
def logit_and_token(ranking):
    return _turned((ranking >> 32).to(tl.int32)).to(tl.float32, bitcast=True), ranking.to(tl.int32) ^ _MAX_INT32


@triton.jit
def _turned(bits):
    """Bits of a float32 as an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ _MAX_INT32, bits)


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
    rankings = tl.where(tokens < vocab_size, ranking_of(x, tokens), _NO_RANKING)
    best_of_tile = tile_rankings + (row.to(tl.int64) * tl.num_programs(1) + tile) * TOP_K
    for place in range(TOP_K):
        best = tl.max(rankings, axis=0)
        tl.store(best_of_tile + place, best)
        rankings = tl.where(rankings == best, _NO_RANKING, rankings)


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
    rankings = tl.load(tile_rankings + row.to(tl.int64) * num_rankings + at, mask=at < num_rankings, other=_NO_RANKING)
    for place in range(TOP_K):
        best = tl.max(rankings, axis=0)
        logit, token = logit_and_token(best)
        tl.store(candidates + row * TOP_K + place, token)
        tl.store(candidate_logits + row * TOP_K + place, logit)
        rankings = tl.where(rankings == best, _NO_RANKING, rankings)


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
    next_context_lens,  # int32 [R], position of the bonus token, the block's slot 0
    token_ids,  # out, int32 [rows]
    num_slots,  # rows of a request, K
    rank,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,  # power of two >= TOP_K
    RANKS: tl.constexpr,  # of the codebooks, read at once
):
    """Scores are in float32. A request with a temperature gets the noise that will sample its target."""
    request = tl.program_id(0)
    degree = tl.load(temperature + request)
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
        if degree > 0:
            scores += degree * noise_of_tokens(tl.load(seed + request), start + 1 + slot, tokens)
        scores = tl.where(scores == scores, scores, float("-inf"))
        is_best = is_candidate & (scores == tl.max(scores, axis=0))
        best = tl.minimum(tl.min(tl.where(is_best, place, TOP_K), axis=0), TOP_K - 1)
        previous = tl.sum(tl.where(place == best, tokens, 0), axis=0)
        tl.store(token_ids + row, previous)
