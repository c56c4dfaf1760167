"""Snapshots of recurrent state: slots behind those of requests, filled and read by plain copies.

The whole slot is copied, records included. So a snapshot is valid whatever the last row left, a folded state or one
whose records are still to be folded.
"""

import torch
from torch import Tensor

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import StateCopies
from dflash_trt.network.state import RecurrentCache, StepState


class SlotSnapshots:
    """Copies between slots; snapshot i is slot `first_slot + i`."""

    def __init__(self, state: StepState[Tensor], *, first_slot: int) -> None:
        caches = [cache for cache in state.target_kv if isinstance(cache, RecurrentCache)]
        self._tensors = [tensor for cache in caches for tensor in cache.tensors.values()]
        self._first_slot = first_slot

    def restore(self, copies: StateCopies) -> None:
        """Fill slots from snapshots, before a step."""
        self._copy(copies.snapshots + self._first_slot, copies.slots)

    def save(self, copies: StateCopies) -> None:
        """Fill snapshots from slots, behind a step."""
        self._copy(copies.slots, copies.snapshots + self._first_slot)

    def _copy(self, sources: Array, destinations: Array) -> None:
        if not len(sources):
            return
        read, written = torch.from_numpy(sources), torch.from_numpy(destinations)
        for tensor in self._tensors:
            tensor.index_copy_(0, written, tensor.index_select(0, read))
