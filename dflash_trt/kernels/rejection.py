"""Rejection sampling of drafts: two launches of `sampling.py`, and helpers for the following ones.

`backends/torch/rejection.py` is the definition. A row is *tested* if it verifies a draft of a request that uses
rejection sampling; programs of all other rows return at once.

    kept_mass     [rows, tiles]  the sum of exponentials of each tile that pass the row's threshold: p, unnormalised
    test_drafts   [rows]         the row's outcome; for a rejected draft the best candidate, sampled from the residual

All other tokens than the draft and its candidates keep their score, so that the draw over the tiles finds their
best. Launching is in `sampling_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import DRAFTS, TOKENS, noise_of_tokens, test_number
from dflash_trt.kernels.sampling_rows import GREEDY, exponentials, is_kept

UNTESTED = tl.constexpr(0)  # outcomes of rows
ACCEPTED = tl.constexpr(1)
REJECTED = tl.constexpr(2)

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # score of a token whose probability is only a rounding error
_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["width", "draft_topk"])
def kept_mass_kernel(
    logits,  # F [rows, vocab_size]
    num_candidates,  # int32 [R]
    temperature,  # float32 [R]
    draft_stream,  # int32 [R]
    row_max,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_threshold,  # float32 [rows]
    tile_max,  # float32 [rows, tiles], of the logits
    tile_scaled_sum,  # float32 [rows, tiles], of e^((logit - tile_max) / temperature)
    tile_kept,  # float32 [rows, tiles], of e^((logit - row_max) / temperature), those that are kept
    vocab_size,
    width,  # rows of a request, K + 1
    draft_topk,
    TILE: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    if _is_tested(row, num_candidates, draft_stream, row_mode, width, draft_topk):
        at = row * tl.num_programs(1) + tile
        degree, largest = tl.load(temperature + row // width), tl.load(row_max + row)
        threshold = tl.load(row_threshold + row)
        scale = tl.exp(tl.div_rn(tl.load(tile_max + at) - largest, degree))
        mass = 0.0
        if threshold <= 0:  # no filter: the sum is known, up to its scale
            mass = scale * tl.load(tile_scaled_sum + at)
        elif scale >= threshold:
            e = exponentials(logits, row, tile * TILE + tl.arange(0, TILE), vocab_size, largest, degree)
            mass = tl.sum(tl.where(is_kept(e, threshold), e, 0.0), axis=0)
        tl.store(tile_kept + at, mass)


@triton.jit(do_not_specialize=["width", "num_tiles", "draft_topk"])
def test_drafts_kernel(
    logits,  # F [rows, vocab_size]
    token_ids,  # int32 [T]
    positions,  # int32 [T]
    logit_rows,  # int32 [rows]
    num_candidates,  # int32 [R]
    draft_topk_ids,  # int32 [R, K * draft_topk]
    draft_topk_probs,  # float32 [R, K * draft_topk]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    row_max,  # float32 [rows]
    row_mode,  # int32 [rows]
    row_threshold,  # float32 [rows]
    tile_kept,  # float32 [rows, tiles]
    row_outcome,  # out, int32 [rows]
    row_score,  # out, float32 [rows], with its noise: best candidate of a rejected row, or its draft
    row_token,  # out, int32 [rows], the first one that has it; the draft of an accepted row
    vocab_size,
    width,
    num_tiles,
    draft_topk,
    TILES: tl.constexpr,  # power of two >= num_tiles
    DRAFT_TOPK: tl.constexpr,  # power of two >= draft_topk
):
    row = tl.program_id(0)
    outcome = tl.full((), UNTESTED, tl.int32)
    if _is_tested(row, num_candidates, draft_stream, row_mode, width, draft_topk):
        request = row // width
        degree, largest, threshold = (
            tl.load(temperature + request),
            tl.load(row_max + row),
            tl.load(row_threshold + row),
        )
        tiles = tl.arange(0, TILES)
        total = tl.sum(tl.load(tile_kept + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0), axis=0)
        token_row = tl.load(logit_rows + row)
        draft, position = tl.load(token_ids + token_row + 1), tl.load(positions + token_row) + 1
        places = tl.arange(0, DRAFT_TOPK)
        at = first_topk(row, width, draft_topk) + places
        tokens = tl.load(draft_topk_ids + at, mask=places < draft_topk, other=_NO_INDEX)
        prob = tl.load(draft_topk_probs + at, mask=places < draft_topk, other=0.0)

        # q is 1 for a draft that was not sampled
        draft_prob = tl.sum(tl.where(tokens == draft, prob, 0.0), axis=0)
        draft_prob = tl.where(draft_prob > 0, draft_prob, 1.0)
        mass = tl.sum(
            _kept_masses(logits, row, draft + places * 0, vocab_size, largest, degree, threshold, places == 0)
        )
        number = test_number(tl.load(seed + request), position)
        is_accepted = number * draft_prob * total < mass

        # the residual; the draft has none, and is what is left where rounding leaves nothing
        is_other = (places < draft_topk) & (tokens != draft)
        masses = _kept_masses(logits, row, tokens, vocab_size, largest, degree, threshold, is_other)
        residual = masses - prob * total
        left = tl.where(residual > 0, degree * tl.log(tl.where(residual > 0, residual, 1.0)), _LOWEST)
        noise = noise_of_tokens(tl.load(seed + request), position, TOKENS, tokens)
        scores = tl.where(masses > 0, left + degree * noise, float("-inf"))
        score = tl.max(scores, axis=0)
        token = tl.min(tl.where((scores == score) & (masses > 0), tokens, _NO_INDEX), axis=0)
        is_draft = (mass > 0) & ((score < _LOWEST) | ((score == _LOWEST) & (draft < token)))
        tl.store(row_score + row, tl.where(is_draft, _LOWEST, score))
        tl.store(row_token + row, tl.where(is_accepted | is_draft, draft, token))
        outcome = tl.where(is_accepted, ACCEPTED, REJECTED)
    tl.store(row_outcome + row, outcome)


@triton.jit
def without_topk(
    scores,  # float32 [TILE], of the tokens from first_token on
    first_token,
    draft_topk_ids,  # int32 [draft_topk], at an address of the row's
    draft,
    draft_topk,
    TILE: tl.constexpr,
):
    """-infinity for a rejected draft and its top-k candidates; few of them are in a tile."""
    offsets = first_token + tl.arange(0, TILE)
    scores = tl.where(offsets == draft, float("-inf"), scores)
    for place in range(draft_topk):
        token = tl.load(draft_topk_ids + place)
        if (token >= first_token) & (token < first_token + TILE):
            scores = tl.where(offsets == token, float("-inf"), scores)
    return scores


@triton.jit
def first_topk(row, width, draft_topk):
    """The index of the first candidate of a tested row's draft."""
    return ((row // width) * (width - 1) + row % width) * draft_topk


@triton.jit
def _is_tested(row, num_candidates, draft_stream, row_mode, width, draft_topk):
    request, slot = row // width, row % width
    is_sampled = (tl.load(draft_stream + request) == DRAFTS) & (tl.load(row_mode + row) != GREEDY) & (draft_topk > 0)
    return is_sampled & (slot < tl.load(num_candidates + request)) & (slot < width - 1)


@triton.jit
def _kept_masses(logits, row, tokens, vocab_size, largest, degree, threshold, mask):
    """float32, e^((logit - row_max) / temperature) of tokens that are kept, 0 of others."""
    is_in = mask & (tokens >= 0) & (tokens < vocab_size)
    x = tl.load(logits + row.to(tl.int64) * vocab_size + tokens, mask=is_in, other=float("-inf")).to(tl.float32)
    e = tl.exp(tl.div_rn(x - largest, degree))
    return tl.where(is_kept(e, threshold), e, 0.0)


@triton.jit(do_not_specialize=["mask_token_id", "width"])
def draft_block_kernel(
    bonus_tokens,  # int32 [R]
    next_context_lens,  # int32 [R]
    token_ids,  # int32 [R, width]: [bonus, MASK ..]
    positions,  # int32 [R, width]: from next_context_lens on
    mask_token_id,
    width,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    slots = tl.arange(0, WIDTH)
    tokens = tl.where(slots == 0, tl.load(bonus_tokens + request), mask_token_id)
    tl.store(token_ids + request * width + slots, tokens, mask=slots < width)
    tl.store(positions + request * width + slots, tl.load(next_context_lens + request) + slots, mask=slots < width)
