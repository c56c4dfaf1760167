"""Gumbel noise for kernels, as in `backends/torch/philox.py`, from Triton's own Philox4x32-10.

Triton has no log1p, and log(1 - v) loses the bits of a small v, where the likely winners are: a series is used there.
Streams are as in that file.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl

TOKENS = tl.constexpr(0)  # streams
DRAFTS = tl.constexpr(1)
TESTS = tl.constexpr(2)

_LARGEST = tl.constexpr(1 - 2**-24)


@triton.jit
def noise_of_range(seed, position, stream, first_token, SIZE: tl.constexpr):
    """float32 [SIZE], noise of the tokens from `first_token`, a multiple of 4.

    Four tokens use one counter.
    """
    quads = first_token // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = _words(seed, position, stream, quads)
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def noise_of_tokens(seed, position, stream, tokens):
    """float32, of these tokens, in any order."""
    w0, w1, w2, w3 = _words(seed, position, stream, tokens // 4)
    word = tokens % 4
    return _gumbel(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@triton.jit
def test_number(seed, position):
    """v of the stream TESTS, a float32 scalar."""
    w0, _, _, _ = _words(seed, position, TESTS, position * 0)
    return _uniform(w0)


@triton.jit
def _words(seed, position, stream, quads):
    zeros = quads * 0
    return tl.philox(seed, zeros + position, quads, zeros + stream, zeros)


@triton.jit
def _uniform(words):
    return tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST)


@triton.jit
def _gumbel(words):
    v = _uniform(words)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))
