"""One rank's places in host memory for pages and snapshots that leave the device.

A place is a row of bytes, in the order of `StepState.paged` or `StepState.slots`, each part at a multiple of 16 bytes.
A page's place has the page of every page group, so it is all that a prefix of as many tokens needs, with snapshots.
"""

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import SNAPSHOTS, CopyRun, ExecutorLimits, PageCopies

ALIGNMENT: Final = 16  # bytes; what kernels copy at a time

Parts = list[tuple[Tensor, Tensor]]  # of a state: uint8 [pages or slots, bytes] on the device, [places, bytes] here


class HostMemory:
    """Copies between pages and places, on the current stream."""

    def __init__(
        self,
        paged: Sequence[tuple[int, Tensor]],
        limits: ExecutorLimits,
        *,
        slots: Sequence[Tensor] = (),
        is_page_locked: bool = False,
    ) -> None:
        """Places for what pages hold, [pages, ...] with its page group, and for `slots`, [slots, ...], of snapshots.

        `limits` say how many. Snapshots are the slots behind those of requests and of padding.
        """
        self._parts: dict[int, Parts] = {}  # a group without layers has none
        self._first_slot = limits.max_batch_size + 1
        num_pages, num_snapshots = limits.num_host_pages, limits.num_host_snapshots
        paged, slots = paged if num_pages else (), slots if num_snapshots else ()
        pages, snapshots = _places_of([tensor for _, tensor in paged], num_pages), _places_of(slots, num_snapshots)
        for (group, tensor), part in zip(paged, _parts(pages, [tensor for _, tensor in paged]), strict=True):
            self._parts.setdefault(group, []).append((_bytes_of(tensor), part))
        for tensor, part in zip(slots, _parts(snapshots, slots), strict=True):
            self._parts.setdefault(SNAPSHOTS, []).append((_bytes_of(tensor), part))
        if is_page_locked:
            for places in (pages, snapshots):
                _lock_pages(places, while_alive=self)

    def copy(self, copies: PageCopies) -> None:
        """In order, and before anything that is submitted later."""
        for run in copies.runs():
            self._copy(run, run.ids + self._first_slot if run.group == SNAPSHOTS else run.ids)

    def _copy(self, run: CopyRun, rows: Array) -> None:
        """Copies of a run; `rows` are its rows of the device's tensors."""
        for row, place in zip(rows.tolist(), run.host_ids.tolist(), strict=True):
            for on_device, places in self._parts.get(run.group, ()):
                read, written = (places[place], on_device[row]) if run.is_onboard else (on_device[row], places[place])
                written.copy_(read, non_blocking=True)


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """Where the part of each tensor's row ends in a place; the next one begins there."""
    return list(accumulate(-(-tensor[0].nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))


def _places_of(tensors: Sequence[Tensor], num_places: int) -> Tensor:  # uint8 [places, bytes]
    """Memory that is never written to costs nothing, unless it is page-locked."""
    return torch.empty((num_places, max(_ends(tensors), default=0)), dtype=torch.uint8)


def _parts(places: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The part of each tensor."""
    for tensor, start in zip(tensors, [0, *_ends(tensors)], strict=False):
        yield places[:, start : start + tensor[0].nbytes]


def _bytes_of(tensor: Tensor) -> Tensor:  # uint8 [rows, bytes], the same memory
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _lock_pages(places: Tensor, *, while_alive: object) -> None:
    """Page-lock as much as there is: PyTorch's own allocator rounds up to a power of two."""
    if not places.nbytes:
        return
    make_cudart: Any = torch.cuda.cudart  # untyped in PyTorch
    cudart = make_cudart()
    torch.cuda.check_error(int(cudart.cudaHostRegister(places.data_ptr(), places.nbytes, 0)))
    weakref.finalize(while_alive, lambda places: cudart.cudaHostUnregister(places.data_ptr()), places)
