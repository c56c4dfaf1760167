"""Drafts for rejection sampling: sampled from a row's most likely tokens, with their probabilities.

`backends/torch/rejection.sample_topk` is the definition. The C most likely tokens of a row are in C pieces of the
vocabulary, the ones with the most likely best tokens: a row's program rereads only these pieces.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

from dflash_trt.kernels.philox import DRAFTS, noise_of_tokens
from dflash_trt.kernels.rankings import NO_RANKING, largest_rankings, logit_and_token, ranking_of

_NO_INDEX = tl.constexpr(0x7FFFFFFF)


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
