"""One rank's places in host memory for pages and snapshots that leave the device.

A place is a row of bytes, in the order of `StepState.paged` or `StepState.slots`, each part at a multiple of 16 bytes.
A page's place has the page of every page group, so it is all that a prefix of as many tokens needs, with snapshots.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import SNAPSHOTS, CopyRun, PageCopies

ALIGNMENT: Final = 16  # bytes; what kernels copy at a time

Parts = list[tuple[Tensor, Tensor]]  # of a state: uint8 [pages or slots, bytes] on the device, [places, bytes] here


class HostMemory:
    """Copies between pages and places, on the current stream."""

    def __init__(
        self,
        paged: Iterable[tuple[int, Tensor]],
        slots: Sequence[Tensor] = (),
        *,
        num_pages: int,
        num_snapshots: int = 0,
        first_slot: int = 0,
        is_page_locked: bool = False,
    ) -> None:
        """`paged` are tensors with their page groups; snapshot i is slot `first_slot + i`."""
        groups, tensors = zip(*paged, strict=True) if num_pages else ((), ())
        self._parts: dict[int, Parts] = {}
        for group, part in zip(groups, _parts(tensors, num_pages, is_page_locked=is_page_locked), strict=True):
            self._parts.setdefault(group, []).append(part)
        if num_snapshots:
            self._parts[SNAPSHOTS] = list(_parts(slots, num_snapshots, is_page_locked=is_page_locked))
        self._first_slot = first_slot

    def copy(self, copies: PageCopies) -> None:
        """In order, and before anything that is submitted later."""
        for run in copies.runs():
            self._copy(run, run.ids + self._first_slot if run.group == SNAPSHOTS else run.ids)

    def _copy(self, run: CopyRun, rows: Array) -> None:
        """Copies of a run; `rows` are its rows of the device's tensors."""
        for row, place in zip(rows.tolist(), run.host_ids.tolist(), strict=True):
            for on_device, places in self._parts[run.group]:
                read, written = (places[place], on_device[row]) if run.is_onboard else (on_device[row], places[place])
                written.copy_(read, non_blocking=True)


def _parts(tensors: Sequence[Tensor], num_places: int, *, is_page_locked: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The bytes of each tensor, with its part of new places."""
    sizes = [tensor[0].nbytes for tensor in tensors]
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    # Memory that is never written to costs nothing, unless it is page-locked.
    places = torch.empty((num_places, ends[-1]), dtype=torch.uint8, pin_memory=is_page_locked)
    for tensor, start, size in zip(tensors, ends[:-1], sizes, strict=True):
        yield tensor.view(len(tensor), -1).view(torch.uint8), places[:, start : start + size]
