"""Places in page-locked host memory for pages that leave a GPU: see `backends/host_memory.py`.

A copy is a launch, on the stream of the steps, that reads or writes the host's memory itself: a page has a part for
each layer, too many for a call of the driver each. The host's addresses are the device's, too (CUDA's unified virtual
addressing).
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from dflash_trt.backends.host_memory import HostMemory, Parts
from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import CopyRun, ExecutorLimits
from dflash_trt.kernels.row_copies_launch import RowCopies
from dflash_trt.network.state import StepState


class PageLockedMemory(HostMemory):
    """Copies on the current stream."""

    def __init__(
        self,
        paged: Sequence[tuple[int, Tensor]],
        limits: ExecutorLimits,
        *,
        slots: Sequence[Tensor] = (),
        device: torch.device,
        is_shared: bool = False,
    ) -> None:
        super().__init__(paged, limits, slots=slots, is_page_locked=device.type == "cuda", is_shared=is_shared)
        self._copies = {
            (group, is_onboard): _copies(parts, device, is_onboard=is_onboard)
            for group, parts in self._parts.items()
            for is_onboard in (False, True)
        }

    @classmethod
    def of(cls, state: StepState[Tensor], limits: ExecutorLimits, device: torch.device, *, is_shared: bool) -> Self:
        return cls(state.paged, limits, slots=state.slots, device=device, is_shared=is_shared)

    def warm_up(self) -> None:
        """Compile the kernel, while all pages are empty."""
        for copies in self._copies.values():
            copies.copy(0, 0)

    def _copy(self, run: CopyRun, rows: Array) -> None:
        copies = self._copies.get((run.group, run.is_onboard))
        if copies is None:  # a page group without layers
            return
        for row, place in zip(rows.tolist(), run.host_ids.tolist(), strict=True):
            copies.copy(*((place, row) if run.is_onboard else (row, place)))


def _copies(parts: Parts, device: torch.device, *, is_onboard: bool) -> RowCopies:
    on_device, places = map(list, zip(*parts, strict=True))
    return RowCopies(*((places, on_device) if is_onboard else (on_device, places)), device=device)
