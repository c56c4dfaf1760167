"""Snapshots of recurrent state: slots after the requests', filled and read by plain copies.

The whole slot is copied, records included. So a snapshot is valid whether the last row stored a folded state or records
that are still to be folded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt.backends.staging import upload
from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import StateCopies


class SlotSnapshots:
    """Copies between slots, on the current stream of a GPU; snapshot i is slot `first_slot + i`."""

    def __init__(self, tensors: Sequence[Tensor], *, first_slot: int) -> None:
        """`tensors` have a row for each slot."""
        self._tensors = tensors
        self._first_slot = first_slot

    def restore(self, copies: StateCopies) -> None:
        """Fill slots from snapshots, before a step."""
        self._copy(copies.snapshots + self._first_slot, copies.slots)

    def save(self, copies: StateCopies) -> None:
        """Copy slots to snapshots, after a step."""
        self._copy(copies.slots, copies.snapshots + self._first_slot)

    def _copy(self, sources: Array, destinations: Array) -> None:
        if not len(sources):
            return
        device = self._tensors[0].device
        read, written = (upload(torch.from_numpy(slots), device) for slots in (sources, destinations))
        for tensor in self._tensors:
            tensor.index_copy_(0, written, tensor.index_select(0, read))
