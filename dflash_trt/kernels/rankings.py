"""Logits and their tokens as one integer, to find the likeliest tokens of a row.

A *ranking* is larger for a larger logit, and of equal logits for the smaller token, so that one maximum finds both and
no two are equal. NaN is below every number.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

NO_RANKING = tl.constexpr(-(1 << 63))  # below all; its token is past every vocabulary

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
def largest_rankings(rankings, count, CAPACITY: tl.constexpr):
    """int64 [CAPACITY]: the `count` largest, of any shape, in falling order, then NO_RANKING."""
    places = tl.arange(0, CAPACITY)
    largest = tl.full([CAPACITY], NO_RANKING, tl.int64)
    for place in range(count):
        best = tl.max(rankings)
        largest = tl.where(places == place, best, largest)
        rankings = tl.where(rankings == best, NO_RANKING, rankings)
    return largest


@triton.jit
def _turned(bits):
    """Bits of a float32 as an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ _MAX_INT32, bits)
