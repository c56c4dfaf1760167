"""Calls of fixed shapes: a row's bits depend neither on its place nor on the other rows.

A GEMM library chooses its kernel, and with it the order of a sum, by the number of rows. An elementwise kernel computes
the end of a tensor, or of a thread's share of it, with other instructions than the rest, and their exp() differs in the
last bit. Calls whose shapes never change leave neither any choice. tests/network/test_fixed_shapes.py measures both.

Blocks of GEMM_ROWS rows read a weight once each, and are filled up for a single row. Blocks of other heights are used,
too, where they are found to give the same bits: oneDNN adds up a few hundred products in one order at any height.
"""

from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

GEMM_ROWS: Final = 16
_HEIGHTS: Final = (1, 2, 4, 8, GEMM_ROWS, 32, 64, 128)
_MIN_COMPARED: Final = 1 << 16  # numbers; of rounded sums in another order one in some hundreds differs in bfloat16
QUERY_ROWS: Final = 8  # rows of one request in a call of attention
KEY_TILE: Final = 64  # the keys of such a call are a multiple of it
_VECTOR: Final = 64  # elements: a multiple of what any CPU's kernels take at once
_PIECE: Final = 32_768 - _VECTOR  # elements: PyTorch divides larger tensors among threads

Pointwise = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # (function, x) -> function(x)


def padded_length(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step


Compute = Callable[[Tensor], Tensor]  # [N, in] -> [N, out], row by row


class BlockHeights:
    """Heights of blocks that give the bits of blocks of GEMM_ROWS: measured, once for each kind of layer."""

    def __init__(self) -> None:
        self._proven: dict[Hashable, tuple[int, ...]] = {}

    def of(self, kind: Hashable, compute: Compute, x: Tensor) -> tuple[int, ...]:
        """Ascending, for calls of `compute` with tensors like x; `kind` stands for all of its kind."""
        key = (kind, x.dtype, x.shape[1], torch.get_num_threads())
        if key not in self._proven:
            self._proven[key] = tuple(height for height in _HEIGHTS if _has_same_bits(compute, x, height))
        return self._proven[key]


def _has_same_bits(compute: Compute, like: Tensor, height: int) -> bool:
    """True if blocks of this height give the bits of blocks of GEMM_ROWS, over many random numbers."""
    if height == GEMM_ROWS:
        return True
    generator, num_compared = torch.Generator().manual_seed(height), 0
    while num_compared < _MIN_COMPARED:
        x = torch.randn(max(height, GEMM_ROWS), like.shape[1], generator=generator).to(like.dtype)
        by_height, expected = (
            torch.cat([compute(block) for block in torch.split(x, rows)]) for rows in (height, GEMM_ROWS)
        )
        if not torch.equal(by_height, expected):
            return False
        num_compared += expected.numel()
    return True


def in_blocks(
    compute: Compute,
    x: Tensor,  # [N, in]
    heights: tuple[int, ...] = (GEMM_ROWS,),  # ascending, of equal bits
) -> Tensor:  # [N, out]
    """`compute` of all rows in blocks of these heights, the last one filled up with zeros."""
    num_rows = len(x)
    if num_rows in heights:
        return compute(x)
    sizes = _block_sizes(num_rows, heights)
    missing = sum(sizes) - num_rows
    blocks = torch.split(F.pad(x, (0, 0, 0, missing)) if missing else x, sizes)
    return torch.cat([compute(block) for block in blocks])[:num_rows]


def _block_sizes(num_rows: int, heights: tuple[int, ...]) -> list[int]:
    """The highest blocks that are full, then the lowest that holds the rest; one at least."""
    sizes: list[int] = []
    for height in reversed([height for height in heights if height >= GEMM_ROWS]):
        count, num_rows = divmod(num_rows, height)
        sizes += [height] * count
    if num_rows or not sizes:
        sizes.append(next(height for height in heights if height >= num_rows))
    return sizes


def directly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A Pointwise that calls the function."""
    return function(x)


def in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A Pointwise whose bits do not depend on an element's place: whole vectors, on one thread."""
    size = x.numel()
    if size % _VECTOR == 0 and size <= _PIECE:
        return function(x.contiguous())
    missing = padded_length(size, _VECTOR) - size
    pieces = torch.split(F.pad(x.flatten(), (0, missing)), _PIECE)
    return torch.cat([function(piece) for piece in pieces])[:size].view(x.shape)
