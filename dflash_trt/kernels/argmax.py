"""Draft tokens straight from low-precision logits: no fp32 copy, and one (value, index) pair per tile.

Rows of requests with a temperature get the noise that will sample the target at their position (`philox.py`), or are
sampled from the row's top-k tokens for rejection sampling; greedy rows do not pay for it. Ties go to the smallest
index, however the vocabulary is cut. NaN is below every number, and the token is in the vocabulary whatever the logits
are: drafts made of NaN are only rejected. `reference_sampling.py` has the definition.

`backends/torch/rejection.sample_topk` defines the top-k tokens. The C most likely tokens of a row are in C pieces of
the vocabulary, the ones with the most likely best tokens: a row's program rereads only these pieces.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import DRAFTS, TOKENS, noise_of_range, noise_of_tokens
from dflash_trt.kernels.sampling_rows import NO_RANKING, largest_rankings, logit_and_token, ranking_of

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["num_slots"])
def tile_argmax_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    next_context_lens,  # int32 [R], position of the bonus token, the block's slot 0
    draft_to_target,  # int64 [vocab_size], the target's ids of a draft vocabulary, whose noise it is
    tile_max,  # float32 [rows, tiles], rows without rejection sampling
    tile_argmax,  # int32 [rows, tiles], the same
    piece_best,  # int64 [rows, tiles * PIECES], rows with rejection sampling
    vocab_size,
    num_slots,  # rows of a request, K
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
    PIECES: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    request = row // num_slots
    offsets = tile * TILE + tl.arange(0, TILE)
    start = logits + row.to(tl.int64) * vocab_size
    x = tl.load(start + offsets, mask=offsets < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    at = row * tl.num_programs(1) + tile
    degree = tl.load(temperature + request)
    if (degree > 0) & (tl.load(draft_stream + request) == DRAFTS):
        best = best_of_pieces(x, tile * TILE, vocab_size, TILE, PIECES)
        tl.store(piece_best + at.to(tl.int64) * PIECES + tl.arange(0, PIECES), best)
    else:
        if degree > 0:
            position = tl.load(next_context_lens + request) + 1 + row % num_slots
            if HAS_MAP:
                tokens = tl.load(draft_to_target + offsets, mask=offsets < vocab_size, other=0).to(tl.int32)
                x += degree * noise_of_tokens(tl.load(seed + request), position, TOKENS, tokens)
            else:
                x += degree * noise_of_range(tl.load(seed + request), position, TOKENS, tile * TILE, TILE)
        largest = tl.max(x, axis=0)
        index = tl.min(tl.where((x == largest) & (offsets < vocab_size), offsets, _NO_INDEX), axis=0)
        tl.store(tile_max + at, largest)
        tl.store(tile_argmax + at, index)


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "draft_topk"])
def combine_argmax_kernel(
    logits,  # F [rows, vocab_size]
    temperature,  # float32 [R]
    seed,  # int64 [R]
    draft_stream,  # int32 [R]
    next_context_lens,  # int32 [R]
    draft_to_target,  # int64 [vocab_size]
    tile_max,  # float32 [rows, tiles]
    tile_argmax,  # int32 [rows, tiles]
    piece_best,  # int64 [rows, tiles * PIECES]
    token_ids,  # out, int32 [rows], of the target
    next_draft_topk_ids,  # out, int32 [rows, draft_topk], of the target
    next_draft_topk_probs,  # out, float32 [rows, draft_topk]; 0 in rows without rejection sampling, as their ids
    vocab_size,
    num_slots,
    num_tiles,
    draft_topk,
    HAS_MAP: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # power of two >= num_tiles
    PIECES: tl.constexpr,
    DRAFT_TOPK: tl.constexpr,  # power of two >= draft_topk
):
    row = tl.program_id(0)
    request = row // num_slots
    degree = tl.load(temperature + request)
    places = tl.arange(0, DRAFT_TOPK)
    is_topk = places < draft_topk
    chosen = tl.zeros([DRAFT_TOPK], tl.int32)
    draft_topk_probs = tl.zeros([DRAFT_TOPK], tl.float32)
    if (degree > 0) & (tl.load(draft_stream + request) == DRAFTS):
        num_pieces = num_tiles * PIECES
        scores, chosen = topk_tokens(
            logits + row.to(tl.int64) * vocab_size,
            piece_best + row.to(tl.int64) * num_pieces,
            vocab_size,
            num_pieces,
            draft_topk,
            TILES * PIECES,
            TILE // PIECES,
            DRAFT_TOPK,
        )
        if HAS_MAP:
            chosen = tl.load(draft_to_target + chosen, mask=is_topk, other=0).to(tl.int32)
        position = tl.load(next_context_lens + request) + 1 + row % num_slots
        token, draft_topk_probs = draw_of(scores, chosen, is_topk, degree, tl.load(seed + request), position)
    else:
        tiles = tl.arange(0, TILES)
        maxima = tl.load(tile_max + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
        indices = tl.load(tile_argmax + row * num_tiles + tiles, mask=tiles < num_tiles, other=_NO_INDEX)
        token = tl.min(tl.where(maxima == tl.max(maxima, axis=0), indices, _NO_INDEX), axis=0)
        token = tl.minimum(token, vocab_size - 1)  # whatever a GPU's maximum makes of NaN
        if HAS_MAP:
            token = tl.load(draft_to_target + token).to(tl.int32)
    tl.store(token_ids + row, token)
    tl.store(next_draft_topk_ids + row * draft_topk + places, chosen, mask=is_topk)
    tl.store(next_draft_topk_probs + row * draft_topk + places, draft_topk_probs, mask=is_topk)


@triton.jit
def best_of_pieces(x, first_token, vocab_size, TILE: tl.constexpr, PIECES: tl.constexpr):
    """int64 [PIECES], the largest ranking of each piece of a tile from `first_token` on, of float32 logits
    of which none is NaN.

    The largest logit and then its first token: fewer registers than rankings of all.
    """
    x = tl.reshape(x, (PIECES, TILE // PIECES))
    starts = first_token + tl.arange(0, PIECES) * (TILE // PIECES)
    tokens = starts[:, None] + tl.arange(0, TILE // PIECES)[None, :]
    largest = tl.max(x, axis=1)
    is_best = (x == largest[:, None]) & (tokens < vocab_size)
    token = tl.min(tl.where(is_best, tokens, _NO_INDEX), axis=1)
    return tl.where(starts < vocab_size, ranking_of(largest, token), NO_RANKING)


@triton.jit
def topk_tokens(
    logits,  # F, at the address of a row
    piece_best,  # int64 [num_pieces], at the address of the row
    vocab_size,
    num_pieces,
    draft_topk,  # at most vocab_size
    PIECES: tl.constexpr,  # power of two >= num_pieces, of a row
    PIECE: tl.constexpr,  # tokens
    DRAFT_TOPK: tl.constexpr,  # power of two >= draft_topk
):
    """Logits float32 [DRAFT_TOPK] and tokens int32, best first; undefined after `draft_topk`."""
    at = tl.arange(0, PIECES)
    rankings = tl.load(piece_best + at, mask=at < num_pieces, other=NO_RANKING)
    _, best_tokens = logit_and_token(largest_rankings(rankings, draft_topk, DRAFT_TOPK))
    tokens = (best_tokens // PIECE * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    rankings = tl.where(tokens < vocab_size, ranking_of(x, tokens), NO_RANKING)
    return logit_and_token(largest_rankings(rankings, draft_topk, DRAFT_TOPK))


@triton.jit
def draw_of(scores, tokens, is_topk, degree, seed, position):
    """The token with the largest noisy score, the first of equals, and the candidates' probabilities."""
    noise = noise_of_tokens(seed, position, DRAFTS, tokens)
    noisy = tl.where(is_topk, scores + degree * noise, float("-inf"))
    places = tl.arange(0, tokens.shape[0])
    is_best = is_topk & (noisy == tl.max(noisy, axis=0))
    best = tl.min(tl.where(is_best, places, tokens.shape[0] - 1), axis=0)
    return tl.sum(tl.where(places == best, tokens, 0), axis=0), topk_probs_of(scores, is_topk, degree)


@triton.jit
def topk_probs_of(scores, is_topk, degree):
    """softmax(scores / degree) of the candidates; all 0 if the scores give none: NaN, +inf, or only -inf."""
    known = tl.where(is_topk, scores, float("-inf"))
    largest = tl.max(tl.where(known == known, known, float("inf")), axis=0)
    has_probs = (largest < float("inf")) & (largest > float("-inf"))
    differences = tl.where(has_probs, known, 0.0) - tl.where(has_probs, largest, 0.0)
    e = tl.exp(tl.div_rn(differences, degree))
    return tl.where(has_probs, e / tl.sum(e, axis=0), 0.0)
