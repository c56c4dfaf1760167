"""Calls of fixed shapes, in which the bits of a row depend neither on its place nor on the rows beside it.

A GEMM library chooses its kernel, and with it the order of a sum, by the number of rows. An elementwise kernel computes
the end of a tensor, or of a thread's share of it, with other instructions than the rest, and their exp() differs in the
last bit. Calls whose shapes never change leave neither any choice. tests/network/test_fixed_shapes.py measures both.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

GEMM_ROWS: Final = 16
QUERY_ROWS: Final = 8  # of one request in a call of attention
KEY_TILE: Final = 64  # the keys of such a call are a multiple of it
_VECTOR: Final = 64  # elements: a multiple of what any CPU's kernels take at once
_PIECE: Final = 32_768 - _VECTOR  # elements: PyTorch divides larger tensors among threads

Pointwise = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]  # (function, x) -> function(x)


def padded_length(length: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step


def in_blocks(
    compute: Callable[[Tensor], Tensor],  # [GEMM_ROWS, in] -> [GEMM_ROWS, out], row by row
    x: Tensor,  # [N, in]
) -> Tensor:  # [N, out]
    """`compute` of all rows, GEMM_ROWS in each call, the last ones zeros."""
    num_rows = len(x)
    if num_rows < GEMM_ROWS:
        block = x.new_zeros(GEMM_ROWS, x.shape[1])
        block[:num_rows] = x
        return compute(block)[:num_rows]
    if num_rows == GEMM_ROWS:
        return compute(x)
    missing = padded_length(num_rows, GEMM_ROWS) - num_rows
    blocks = torch.split(F.pad(x, (0, 0, 0, missing)) if missing else x, GEMM_ROWS)
    return torch.cat([compute(block) for block in blocks])[:num_rows]


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
