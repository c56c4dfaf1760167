"""Drafts of requests whose drafts are drawn apart: of the likeliest tokens of a row, and by which chances.

`backends/torch/rejection.draw_apart` is the definition. The likeliest C tokens of a row are in C pieces of the
vocabulary, those whose best tokens are the likeliest: a row's program reads no more than these pieces again.
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
def likeliest_tokens(
    logits,  # F, at the address of a row
    piece_best,  # int64 [num_pieces], at the address of the row
    vocab_size,
    num_pieces,
    num_choices,  # at most vocab_size
    PIECES: tl.constexpr,  # power of two >= num_pieces, of a row
    PIECE: tl.constexpr,  # tokens
    NUM_CHOICES: tl.constexpr,  # power of two >= num_choices
):
    """Logits float32 [NUM_CHOICES] and tokens int32, best first; behind the choices they mean nothing."""
    at = tl.arange(0, PIECES)
    rankings = tl.load(piece_best + at, mask=at < num_pieces, other=NO_RANKING)
    _, best_tokens = logit_and_token(largest_rankings(rankings, num_choices, NUM_CHOICES))
    tokens = (best_tokens // PIECE * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    rankings = tl.where(tokens < vocab_size, ranking_of(x, tokens), NO_RANKING)
    return logit_and_token(largest_rankings(rankings, num_choices, NUM_CHOICES))


@triton.jit
def draw_of(scores, tokens, is_choice, degree, seed, position):
    """The token whose score is largest with its noise, the first of equals, and what it was drawn by."""
    noise = noise_of_tokens(seed, position, DRAFTS, tokens)
    noisy = tl.where(is_choice, scores + degree * noise, float("-inf"))
    places = tl.arange(0, tokens.shape[0])
    is_best = is_choice & (noisy == tl.max(noisy, axis=0))
    best = tl.min(tl.where(is_best, places, tokens.shape[0] - 1), axis=0)
    return tl.sum(tl.where(places == best, tokens, 0), axis=0), chances_of(scores, is_choice, degree)


@triton.jit
def chances_of(scores, is_choice, degree):
    """softmax(scores / degree) of the choices; 0 of all where the scores give none: NaN, +inf, or -inf alone."""
    known = tl.where(is_choice, scores, float("-inf"))
    largest = tl.max(tl.where(known == known, known, float("inf")), axis=0)
    has_chances = (largest < float("inf")) & (largest > float("-inf"))
    differences = tl.where(has_chances, known, 0.0) - tl.where(has_chances, largest, 0.0)
    e = tl.exp(tl.div_rn(differences, degree))
    return tl.where(has_chances, e / tl.sum(e, axis=0), 0.0)
