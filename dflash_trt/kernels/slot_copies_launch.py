"""Launches of slot copies. Tensors are found by address, so one launch covers any number of layers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.slot_copies import copy_slot_kernel

WORDS: Final = (16, 4, 2)  # bytes that a slot is a multiple of; the largest is copied four words at a time
BLOCK: Final = 4096  # words of a program
NUM_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class SlotBlocks:
    """Tensors whose slots are multiples of WORD bytes, in parts of one program each."""

    word: int
    blocks: Tensor  # int64 [B, 3], see `copy_slot_kernel`


class SlotCopies:
    """Copies between slots of `tensors`, [slots, ...] each, whose addresses are fixed. Never waits."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError for tensors that the kernel would misread."""
        groups: dict[int, list[tuple[int, int, int]]] = {}
        for tensor in tensors:
            word = _word_of(tensor)
            groups.setdefault(word, []).extend(_parts(tensor, min(word, 4)))
        self._tensors = tuple(tensors)  # keeps the addresses valid
        self._groups = [
            SlotBlocks(word, torch.tensor(groups[word], device=tensors[0].device)) for word in WORDS if word in groups
        ]

    def copy(self, source: int, destination: int) -> None:
        """All tensors of one slot, on the current stream."""
        for group in self._groups:
            copy_slot_kernel[(len(group.blocks),)](
                group.blocks, source, destination, WORD=group.word, BLOCK=BLOCK, num_warps=NUM_WARPS
            )


def _word_of(tensor: Tensor) -> int:
    """The largest of WORDS that address and slots are multiples of."""
    num_bytes = tensor[0].nbytes
    for word in WORDS:
        if tensor.is_contiguous() and num_bytes % word == 0 and tensor.data_ptr() % word == 0:
            return word
    raise ValueError(f"slots: expected contiguous ones of an even number of bytes, found {num_bytes} bytes")


def _parts(tensor: Tensor, word: int) -> Iterator[tuple[int, int, int]]:
    distance = math.prod(tensor.shape[1:]) * tensor.itemsize // word
    for start in range(0, distance, BLOCK):
        yield tensor.data_ptr() + start * word, distance, min(BLOCK, distance - start)
