"""Philox4x32-10 for kernels: the numbers of `backends/torch/philox.py`, from 64-bit products.

Definition: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

# mypy: ignore-errors

import triton
import triton.language as tl

_PHILOX_A = tl.constexpr(0xD2511F53)
_PHILOX_B = tl.constexpr(0xCD9E8D57)
_WEYL_A = tl.constexpr(0x9E3779B9)
_WEYL_B = tl.constexpr(0xBB67AE85)
_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox_first_word(key, position):
    """First word of Philox4x32-10 with the counter (position, 0, 0, 0), as int64."""
    key0, key1 = key.to(tl.uint64) & _WORD, key.to(tl.uint64) >> 32
    c0 = position.to(tl.uint64)
    c1, c2, c3 = c0 * 0, c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        product0, product1 = c0 * _PHILOX_A, c2 * _PHILOX_B
        c0 = (product1 >> 32) ^ c1 ^ key0
        c2 = (product0 >> 32) ^ c3 ^ key1
        c1, c3 = product1 & _WORD, product0 & _WORD
        key0, key1 = (key0 + _WEYL_A) & _WORD, (key1 + _WEYL_B) & _WORD
    return c0.to(tl.int64)
