"""Philox4x32-10 in integer tensor arithmetic, and the Gumbel noise that is made of it: no state to keep.

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

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
LARGEST = 1 - 2**-24  # of v: what follows in float32 is 1
TOKENS: Final = 0  # streams; the first two are values of the step input `draft_stream`
DRAFTS: Final = 1
TESTS: Final = 2


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds. Every word is an int64 tensor holding a 32-bit value; shapes broadcast. Returns four words.

    The upper half of a product may be taken for a sign: its bits are right, and those that the shift adds are masked.
    """
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ key0) & WORD, product1 & WORD
        c2, c3 = ((product0 >> 32) ^ c3 ^ key1) & WORD, product0 & WORD
        key0, key1 = (key0 + WEYL[0]) & WORD, (key1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


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
    seed, position = seed[:, None], position[:, None]
    zero = torch.zeros_like(position)
    return torch.stack(philox((seed & WORD, seed >> 32), (position, quads, zero + stream, zero)), dim=2)


def _uniform(words: Tensor) -> Tensor:
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=LARGEST)


def _gumbel(words: Tensor) -> Tensor:
    return _uniform(words).neg_().log1p_().neg_().log_().neg_()
