"""Philox4x32-10 in integer tensor arithmetic: random numbers by (seed, position), with no state to keep.

Definition: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). A request's text then depends on
its seed and on nothing else in the batch. Products of 32-bit words are taken in 16-bit halves because PyTorch has no
unsigned 64-bit multiply.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds. Every word is an int64 tensor holding a 32-bit value; all of one shape. Returns four words."""
    key0, key1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(
    seed: Tensor,  # int64 [N], non-negative
    position: Tensor,  # int64 [N], absolute position of the token to be drawn
) -> Tensor:
    """float32 [N] in [0, 1), 24 random bits each."""
    zero = torch.zeros_like(position)
    words = philox((seed & _WORD, seed >> 32), (position, zero, zero, zero))
    return (words[0] >> 8).to(torch.float32) * 2.0**-24


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product."""
    high, low = word >> 16, word & 0xFFFF
    factor_high, factor_low = factor >> 16, factor & 0xFFFF
    low_product = low * factor_low
    middle = high * factor_low + (low_product >> 16)  # < 2**33: no overflow
    cross = low * factor_high + (middle & 0xFFFF)
    return (high * factor_high + (middle >> 16) + (cross >> 16), ((cross & 0xFFFF) << 16) | (low_product & 0xFFFF))
