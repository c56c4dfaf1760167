"""Recurrent states of slots: when snapshots fill them, and at which prompt tokens they are saved.

A prompt chunk ends where its state is to be saved, so a snapshot is a plain copy of a slot after a step, and no kernel
knows of it. Prompts are saved after their last full page, and where they leave the cached pages of another prompt: a
third prompt finds the prefix that two prompts share.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import CHAINED, NO_COPIES, StateCopies
from dflash_trt.scheduler.prefix_tree import PrefixNode
from dflash_trt.scheduler.snapshots import SnapshotStore

_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A snapshot that an uncommitted step saves: the state after `num_tokens` tokens."""

    step: int
    num_tokens: int
    snapshot_id: int


class SlotStates:
    """Recurrent states of slots, for targets with recurrent layers; does nothing for others."""

    def __init__(self, snapshots: SnapshotStore, *, num_slots: int, page_size: int) -> None:
        self._snapshots = snapshots
        self._has_snapshots = snapshots.num_snapshots > 0
        self._page_size = page_size
        self._restored_from = np.full(num_slots, _NONE)  # int64 [S], the snapshot that the first row of a slot needs
        self._saved_at: list[list[int]] = [[] for _ in range(num_slots)]  # ascending numbers of tokens
        self._pending: list[list[PendingSave]] = [[] for _ in range(num_slots)]

    def assign_snapshots(self, slot: int, path: list[PrefixNode], *, num_cached_pages: int, num_tokens: int) -> None:
        """Choose the snapshots to restore and to save for a request with a new slot.

        `path` is its prefix, held already; the pages of a longer one may be cached.
        """
        if not self._has_snapshots:
            return
        if path:
            self._restored_from[slot] = self._snapshots.retain(path[-1])
        places = {num_cached_pages, (num_tokens - 1) // self._page_size}
        self._saved_at[slot] = sorted(place * self._page_size for place in places if place > len(path))

    def release_snapshots(self, slot: int) -> None:
        """Release the snapshots of a slot whose request leaves."""
        self._release(slot)
        for save in self._pending[slot]:
            self._snapshots.release_reserved(save.snapshot_id)
        self._pending[slot], self._saved_at[slot] = [], []

    def chunk_len(self, slot: int, start: int, num_tokens: int) -> int:
        """Tokens of a chunk from `start` on, which ends where the state is saved, or after `num_tokens`."""
        end = next((end for end in self._saved_at[slot] if end > start), start + num_tokens)
        return min(num_tokens, end - start)

    def copies(
        self, slots: Array, context_lens: Array, num_tokens: Array, *, is_first: Array, step: int
    ) -> tuple[StateCopies, StateCopies]:
        """Restores and saves of the rows of a step; `is_first`: no row of that slot is uncommitted."""
        if not self._has_snapshots or (context_lens == CHAINED).all():
            return NO_COPIES, NO_COPIES
        is_restored = is_first & (self._restored_from[slots] != _NONE)
        restored = slots[is_restored]
        saves = []
        is_given, ends = context_lens != CHAINED, context_lens + num_tokens
        for slot, end in zip(slots[is_given].tolist(), ends[is_given].tolist(), strict=True):
            if end in self._saved_at[slot] and (snapshot_id := self._snapshots.reserve()) is not None:
                self._pending[slot].append(PendingSave(step, end, snapshot_id))
                saves.append((slot, snapshot_id))
        return StateCopies(restored, self._restored_from[restored]), _copies(saves)

    def abandon(self, slots: Array, *, step: int) -> None:
        """A step did not run."""
        for slot in slots.tolist():
            for save in [save for save in self._pending[slot] if save.step == step]:
                self._pending[slot].remove(save)
                self._snapshots.release_reserved(save.snapshot_id)

    def commit_rows(self, slots: Array) -> None:
        """Release the snapshots that the committed rows of these slots have restored."""
        for slot in slots[self._restored_from[slots] != _NONE].tolist():
            self._release(slot)

    def cache_snapshot(self, slot: int, num_tokens: int, node: PrefixNode) -> None:
        """A slot's first `num_tokens` tokens end with `node` of the tree: it gets their state, if saved."""
        for save in [save for save in self._pending[slot] if save.num_tokens == num_tokens]:
            self._pending[slot].remove(save)
            self._snapshots.attach(save.snapshot_id, node)

    def check_integrity(self, free: Array) -> None:
        """Assert that the free slots, and only steps and requests of others, hold nothing."""
        assert (self._restored_from[free] == _NONE).all() and not any(self._pending[slot] for slot in free.tolist())
        ids = [save.snapshot_id for pending in self._pending for save in pending]
        held = set(self._restored_from[self._restored_from != _NONE].tolist())
        assert len(ids) + len(held) == self._snapshots.num_in_use, "a snapshot in use has no owner"

    def _release(self, slot: int) -> None:
        if self._restored_from[slot] != _NONE:
            self._snapshots.release(int(self._restored_from[slot]))
            self._restored_from[slot] = _NONE


def _copies(pairs: list[tuple[int, int]]) -> StateCopies:
    if not pairs:
        return NO_COPIES
    slots, snapshots = np.array(pairs).T
    return StateCopies(slots, snapshots)
