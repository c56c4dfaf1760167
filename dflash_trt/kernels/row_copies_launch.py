"""Launches of row copies. Tensors are found by address, so one launch covers any number of layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.row_copies import copy_row_kernel

WORDS: Final = (16, 4, 2)  # bytes that a row is a multiple of; the largest is copied four words at a time
BLOCK: Final = 4096  # words of a program
NUM_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Tensors whose rows are multiples of WORD bytes, in parts of one program each."""

    word: int
    blocks: Tensor  # int64 [B, 5], see `copy_row_kernel`


class RowCopies:
    """Copies between rows of `sources` and `destinations`, [rows, ...] each, whose addresses are fixed. Never waits.

    Sources and destinations go in pairs, of which either may be page-locked host memory; they may be the same.
    """

    def __init__(self, sources: Sequence[Tensor], destinations: Sequence[Tensor], *, device: torch.device) -> None:
        """`device` launches. Raises ValueError for tensors that the kernel would misread."""
        groups: dict[int, list[tuple[int, int, int, int, int]]] = {}
        for source, destination in zip(sources, destinations, strict=True):
            word = min(_word_of(source), _word_of(destination))
            groups.setdefault(word, []).extend(_parts(source, destination, min(word, 4)))
        self._tensors = (*sources, *destinations)  # keeps the addresses valid
        self._groups = [RowBlocks(word, torch.tensor(groups[word], device=device)) for word in WORDS if word in groups]

    def copy(self, source: int, destination: int) -> None:
        """One row of all tensors, on the current stream."""
        for group in self._groups:
            copy_row_kernel[(len(group.blocks),)](
                group.blocks, source, destination, WORD=group.word, BLOCK=BLOCK, num_warps=NUM_WARPS
            )


def _word_of(tensor: Tensor) -> int:
    """The largest of WORDS that address, rows and their distance are multiples of."""
    num_bytes = tensor[0].nbytes
    for word in WORDS:
        numbers = (num_bytes, tensor.data_ptr(), tensor.stride(0) * tensor.itemsize)
        if tensor[0].is_contiguous() and all(number % word == 0 for number in numbers):
            return word
    raise ValueError(f"rows: expected contiguous ones of an even number of bytes, found {num_bytes} bytes")


def _parts(source: Tensor, destination: Tensor, word: int) -> Iterator[tuple[int, int, int, int, int]]:
    assert source[0].nbytes == destination[0].nbytes, "a row is copied whole"
    distances = [tensor.stride(0) * tensor.itemsize // word for tensor in (source, destination)]
    size = source[0].nbytes // word
    for start in range(0, size, BLOCK):
        addresses = [tensor.data_ptr() + start * word for tensor in (source, destination)]
        yield addresses[0], distances[0], addresses[1], distances[1], min(BLOCK, size - start)
