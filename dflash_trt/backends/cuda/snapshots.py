"""Snapshots of recurrent state on a GPU: slots after the requests'; see `backends/torch/snapshots.py`.

The copies are launches on the stream of the steps, before and after a step's graph. So they run in the order of the
steps, whatever the host knows of them yet, and no graph depends on them.
"""

from torch import Tensor

from dflash_trt.core.step_plan import StateCopies
from dflash_trt.kernels.row_copies_launch import RowCopies
from dflash_trt.network.state import StepState


class DeviceSnapshots:
    """Copies between slots, on the current stream; snapshot i is slot `first_slot + i`."""

    def __init__(self, state: StepState[Tensor], *, first_slot: int) -> None:
        slots = state.slots
        self._slots = RowCopies(slots, slots, device=slots[0].device) if slots else None
        self._first_slot = first_slot

    def restore(self, copies: StateCopies) -> None:
        """Fill slots from snapshots, before a step."""
        for slot, snapshot in zip(copies.slots.tolist(), copies.snapshots.tolist(), strict=True):
            self._copy(self._first_slot + snapshot, slot)

    def save(self, copies: StateCopies) -> None:
        """Copy slots to snapshots, after a step."""
        for slot, snapshot in zip(copies.slots.tolist(), copies.snapshots.tolist(), strict=True):
            self._copy(slot, self._first_slot + snapshot)

    def warm_up(self) -> None:
        """Compile the kernel, on the slot of padding."""
        if self._slots is not None:
            self._copy(self._first_slot - 1, self._first_slot - 1)

    def _copy(self, source: int, destination: int) -> None:
        assert self._slots is not None, "a target without recurrent layers has no snapshots"
        self._slots.copy(source, destination)
