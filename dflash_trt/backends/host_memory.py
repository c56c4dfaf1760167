"""One rank's places in host memory for pages and snapshots that leave the device.

A place is a row of bytes, in the order of `StepState.paged` or `StepState.slots`, each part at a multiple of 16 bytes.
A page's place has the page of every page group, so it is all that a prefix of as many tokens needs, with snapshots.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.backends.staging import CopiedStep, new_timer
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
        is_shared: bool = False,
    ) -> None:
        """Places for what pages hold, [pages, ...] with its page group, and for `slots`, [slots, ...], of snapshots.

        `limits` say how many. Snapshots are the slots behind those of requests and of padding. `is_shared` lets other
        processes map the memory by `files`.
        """
        self._parts: dict[int, Parts] = {}  # a group without layers has none
        self._first_slot = limits.max_batch_size + 1
        num_pages, num_snapshots = limits.num_host_pages, limits.num_host_snapshots
        paged, slots = paged if num_pages else (), slots if num_snapshots else ()
        self.files: dict[bool, int] = {}  # descriptors of shared memory, with True that of snapshots
        pages = self._places_of([tensor for _, tensor in paged], num_pages, is_shared=is_shared)
        snapshots = self._places_of(slots, num_snapshots, is_state=True, is_shared=is_shared)
        self._places = {False: pages, True: snapshots}
        for (group, tensor), part in zip(paged, _parts(pages, [tensor for _, tensor in paged]), strict=True):
            self._parts.setdefault(group, []).append((_bytes_of(tensor), part))
        for tensor, part in zip(slots, _parts(snapshots, slots), strict=True):
            self._parts.setdefault(SNAPSHOTS, []).append((_bytes_of(tensor), part))
        if is_page_locked:
            for places in (pages, snapshots):
                _lock_pages(places, while_alive=self)

    def _places_of(
        self, tensors: Sequence[Tensor], num_places: int, *, is_state: bool = False, is_shared: bool
    ) -> Tensor:  # uint8 [places, bytes]
        """Memory that is never written to costs nothing, unless it is page-locked."""
        num_bytes = num_places * max(_ends(tensors), default=0)
        if not (is_shared and num_bytes):
            return torch.empty((num_places, num_bytes // max(num_places, 1)), dtype=torch.uint8)
        descriptor = self.files[is_state] = os.memfd_create("dflash-places")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, num_bytes)
        path = f"/proc/self/fd/{descriptor}"
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8).view(num_places, -1)

    def copy(self, copies: PageCopies) -> None:
        """In order, and before anything that is submitted later."""
        for run in copies.runs():
            self._copy(run, run.ids + self._first_slot if run.group == SNAPSHOTS else run.ids)

    def copied(self, copies: PageCopies, device: torch.device) -> CopiedStep:
        """The same as a step of its own."""
        started = new_timer(device)
        self.copy(copies)
        return CopiedStep(started, new_timer(device))

    def bytes_of(self, place: int, *, is_state: bool) -> memoryview:
        """A place's memory, for whoever knows that no copy touches it."""
        return self._places[is_state][place].numpy().data

    def _copy(self, run: CopyRun, rows: Array) -> None:
        """Copies of a run; `rows` are its rows of the device's tensors."""
        for row, place in zip(rows.tolist(), run.host_ids.tolist(), strict=True):
            for on_device, places in self._parts.get(run.group, ()):
                read, written = (places[place], on_device[row]) if run.is_onboard else (on_device[row], places[place])
                written.copy_(read, non_blocking=True)


class HasPlaces:
    """An executor of one rank, which has places."""

    _host_memory: HostMemory

    def place_bytes(self, place: int, is_state: bool) -> list[memoryview]:
        """See EngineExecutor."""
        return [self._host_memory.bytes_of(place, is_state=is_state)]

    @property
    def place_files(self) -> dict[bool, int]:
        """See ShardExecutor."""
        return self._host_memory.files


def _ends(tensors: Sequence[Tensor]) -> list[int]:
    """Where the part of each tensor's row ends in a place; the next one begins there."""
    return list(accumulate(-(-tensor[0].nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))


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
