"""A row of some tensors onto a row of others, such as a slot onto another, in a launch or two."""

# mypy: ignore-errors
# ruff: noqa: N803  (constants of a kernel are upper case)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["source", "destination"])
def copy_row_kernel(
    blocks,  # int64 [B, 5]: for source and destination each, the address of a part of row 0 and, in words, the distance
    # of rows; then the part's size in words
    source,
    destination,
    WORD: tl.constexpr,  # bytes; 16: four words of 4 bytes, at multiples of 16
    BLOCK: tl.constexpr,  # words, at least the size of any part
):
    """Grid: (B,). A row that is copied onto itself stays as it is."""
    block = blocks + 5 * tl.program_id(0).to(tl.int64)
    from_first, from_distance = tl.load(block), tl.load(block + 1)
    to_first, to_distance, size = tl.load(block + 2), tl.load(block + 3), tl.load(block + 4)
    read = from_first.to(tl.pointer_type(tl.int16) if WORD == 2 else tl.pointer_type(tl.int32))
    written = to_first.to(tl.pointer_type(tl.int16) if WORD == 2 else tl.pointer_type(tl.int32))
    if WORD == 16:
        read, written = tl.multiple_of(read, 16), tl.multiple_of(written, 16)
        from_distance, to_distance = tl.multiple_of(from_distance, 4), tl.multiple_of(to_distance, 4)
        size = tl.multiple_of(size, 4)
    at = tl.arange(0, BLOCK)
    value = tl.load(read + source * from_distance + at, mask=at < size)
    tl.store(written + destination * to_distance + at, value, mask=at < size)
