"""One slot onto another: all tensors of recurrent state, of all layers, in a launch or two."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source", "destination"])
def copy_slot_kernel(
    blocks,  # int64 [B, 3]: the address of a part of slot 0, then in words the distance of slots and the part's size
    source,
    destination,
    WORD: tl.constexpr,  # bytes; 16: four words of 4 bytes, at multiples of 16
    BLOCK: tl.constexpr,  # words, at least the size of any part
):
    """Grid: (B,). A slot that is copied onto itself stays as it is."""
    block = blocks + 3 * tl.program_id(0).to(tl.int64)
    first, distance, size = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    words = first.to(tl.pointer_type(tl.int16) if WORD == 2 else tl.pointer_type(tl.int32))
    if WORD == 16:
        words = tl.multiple_of(words, 16)
        distance, size = tl.multiple_of(distance, 4), tl.multiple_of(size, 4)
    at = tl.arange(0, BLOCK)
    value = tl.load(words + source * distance + at, mask=at < size)
    tl.store(words + destination * distance + at, value, mask=at < size)
