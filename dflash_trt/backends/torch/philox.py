"""Philox4x32-10, and the Gumbel noise that is made of it: no state to keep.

The definition of the noise for every backend: token x at position p of a request has

    word   x % 4 of Philox4x32-10 with the key (seed's low 32 bits, its high 32 bits) and the counter (p, x // 4, s, 0)
    v      (word + 1/2) / 2^32 in float32, at most 1 - 2^-24: strictly between 0 and 1
    noise  g = -log(-log(1 - v)), 1 - v being the uniform number; small v, the likely winners, keep all their bits

The stream s says what the numbers are for: TOKENS, DRAFTS, TESTS. The target's token is the argmax of score + T g over
the tokens that its filters keep, with the noise of TOKENS. It is a sample of softmax(score / T), whatever is drafted
(the Gumbel-max theorem). A draft is the argmax of the drafter's scores + T g, with the noise of one of two streams:

    TOKENS   of requests with a seed of their own: it is likely to equal the target's token, with probability
             (1 - d) / (1 + d) at least, d being the total variation distance of the two distributions
    DRAFTS   of the others: a sample apart from the target's, which a test with a number v of TESTS accepts with
             probability 1 - d (`rejection.py`)

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Daliri, Musco and Suresh, "Coupling without
communication and drafter-invariant speculative decoding" (2024).
"""

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LARGEST = 1 - 2**-24  # largest v: the next float32 is 1
TOKENS: Final = 0  # streams; the first two are values of the step input `draft_stream`
DRAFTS: Final = 1
TESTS: Final = 2

Words = NDArray[np.uint64]  # each below 2^32

_MULTIPLIERS: Final = tuple(map(np.uint64, MULTIPLIERS))
_WEYL: Final = tuple(map(np.uint64, WEYL))
_WORD: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def philox(key: tuple[Words, Words], counter: tuple[Words, Words, Words, Words]) -> Words:
    """Ten rounds of 32-bit words. The counter's broadcast to [...], the key's to them; returns [4, ...]."""
    words = np.stack(np.broadcast_arrays(*counter))
    c0, c1, c2, c3 = words
    products = np.empty((2, *c0.shape), np.uint64)
    key0, key1 = key
    for _ in range(10):
        np.multiply(c0, _MULTIPLIERS[0], out=products[0])
        np.multiply(c2, _MULTIPLIERS[1], out=products[1])
        for c, other, product, word in ((c0, c1, products[1], key0), (c2, c3, products[0], key1)):
            np.right_shift(product, _HALF, out=c)
            c ^= other
            c ^= word
            np.bitwise_and(product, _WORD, out=other)
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return words


def token_words(
    seed: Tensor,  # int64 [N], non-negative
    position: Tensor,  # int64 [N], absolute position of the token to be chosen
    vocab_size: int,
) -> Tensor:
    """int64 [N, vocab_size], 32 random bits each, of the stream TOKENS."""
    quads = torch.arange(-(-vocab_size // 4), device=seed.device)[None]
    return _words(seed, position, quads, TOKENS).flatten(1)[:, :vocab_size]


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """float32 [N, vocab_size]; arguments as for `token_words`."""
    return _gumbel(token_words(seed, position, vocab_size))


def gumbel_noise_of(seed: Tensor, position: Tensor, token_ids: Tensor, stream: Tensor | int = TOKENS) -> Tensor:
    """The columns `token_ids` [N, M] of `gumbel_noise`, row by row; `stream` may be integers [N]."""
    token_ids = token_ids.long()
    words = _words(seed, position, token_ids // 4, stream if isinstance(stream, int) else stream.long()[:, None])
    return _gumbel(words.gather(2, token_ids[:, :, None] % 4)[:, :, 0])


def noise_and_numbers(seed: Tensor, position: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """`gumbel_noise`, and v of the stream TESTS at token 0, float32 [N]: in the time of the first."""
    num_quads = -(-vocab_size // 4)
    counters = torch.arange(num_quads + 1, device=seed.device)
    is_test = counters == num_quads
    words = _words(seed, position, torch.where(is_test, 0, counters)[None], TESTS * is_test.long()[None])
    return _gumbel(words[:, :num_quads].flatten(1)[:, :vocab_size]), _uniform(words[:, num_quads, 0])


def _words(
    seed: Tensor,  # int64 [N]
    position: Tensor,  # int64 [N]
    quads: Tensor,  # int64 [1 or N, Q]
    stream: Tensor | int,  # int64 [1 or N, 1 or Q]
) -> Tensor:
    """int64 [N, Q, 4]."""
    keys, places, counters = (_uint64(x) for x in (seed[:, None], position[:, None], quads))
    streams = np.array([[stream]], np.uint64) if isinstance(stream, int) else _uint64(stream)
    words = philox((keys & _WORD, keys >> _HALF), (places, counters, streams, np.zeros_like(places)))
    return torch.from_numpy(words.view(np.int64)).permute(1, 2, 0).contiguous().to(seed.device)


def _uint64(values: Tensor) -> Words:  # int64, non-negative
    return values.numpy(force=True).view(np.uint64)


def _uniform(words: Tensor) -> Tensor:
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=LARGEST)


def _gumbel(words: Tensor) -> Tensor:
    return _uniform(words).neg_().log1p_().neg_().log_().neg_()
