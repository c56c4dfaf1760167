"""Running requests by slot: one array per property, so that a step costs no object per token.

The device has the same slots. A slot is free, or has one request from its admission to its end or preemption. At most
one step of it is uncommitted while another one is planned.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.logit_rules import SlotUpdate
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.core.step_plan import ExecutorLimits, PageUpdates, StepPlan
from dflash_trt.scheduler.sequence import Sequence

_NEVER = np.iinfo(np.int64).max
NO_TOKEN = -1  # fills rows of stop_ids


class SlotTable:
    """Integers are int64 [S] unless they say otherwise."""

    def __init__(self, limits: ExecutorLimits) -> None:
        size, self._page_size = limits.max_batch_size, limits.page_size
        self.sequences: list[Sequence | None] = [None] * size
        # Prompt and emitted tokens, with room for one more row of a step; memory is used only where touched.
        self.token_ids = np.zeros((size, limits.max_seq_len + limits.max_draft_len + 1), np.int64)
        self.page_ids = np.zeros((size, limits.table_width), np.int64)  # columns as in PageUpdates
        self.num_tokens = np.zeros(size, np.int64)
        self.num_pages = np.zeros(size, np.int64)  # pages of the first group
        self.num_kept = np.zeros(size, np.int64)  # pages of them in the prefix tree
        self.fills_page_at = np.zeros(size, np.int64)  # the context length from which one more can be kept
        self.max_len = np.zeros(size, np.int64)
        self.context_len = np.zeros(size, np.int64)  # tokens whose K/V are committed
        self.epoch = np.full(size, -1)  # number of the request's admission; -1 if free
        self.stop_ids = np.full((size, 1), NO_TOKEN)  # int64 [S, any]
        self.wants_logprobs = np.zeros(size, bool)
        self.num_top_logprobs = np.zeros(size, np.int64)
        self.is_constrained = np.zeros(size, bool)
        self.sampling: dict[str, Array] = {
            row.name: np.zeros(size, np.float64 if row.dtype == "float32" else np.int64) for row in STEP_SAMPLING_FIELDS
        }
        # A chained row may follow: the last planned row emits. It has `num_drafts` drafts to verify.
        self.is_decoding = np.zeros(size, bool)
        self.num_drafts = np.zeros(size, np.int64)
        # Of the drafts of the last committed row; float64 [S, max_draft_len].
        self.draft_confidence = np.full((size, limits.max_draft_len), np.nan)
        # Positions that the newest uncommitted row writes at most; 0 without one.
        self.flight_tokens = np.zeros(size, np.int64)
        self.flight_candidates = np.zeros(size, np.int64)
        self.flight_emits = np.zeros(size, bool)
        self.flight_step = np.full(size, -1)
        self._free = list(range(size - 1, -1, -1))  # a stack: the lowest is taken first
        self._num_epochs = 0
        self._updates: list[tuple[Array, Array, Array]] = []
        # On the device, once it has the updates; True at first, because it may have served another scheduler.
        self._has_rules = [True] * size
        self._slot_updates: tuple[SlotUpdate, ...] = ()

    def assign_slot(self, sequence: Sequence, page_ids: Items[int], *, num_kept: int) -> int:
        """Give a request a slot and its pages; the first `num_kept` are its cached prefix.

        Returns the slot.
        """
        slot = self._free.pop()
        sequence.slot, self.sequences[slot] = slot, sequence
        num_tokens = len(sequence.token_ids)
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_tokens[slot] = num_tokens
        self.max_len[slot] = sequence.max_len
        self.num_pages[slot] = 0
        self.set_kept(slot, num_kept)
        self.is_decoding[slot] = self.flight_emits[slot] = False
        self.flight_tokens[slot] = self.flight_candidates[slot] = 0
        self.epoch[slot] = self._num_epochs
        self._num_epochs += 1
        self.wants_logprobs[slot] = sequence.request.sampling.logprobs
        self.num_top_logprobs[slot] = sequence.request.sampling.top_logprobs
        self.is_constrained[slot] = sequence.matcher is not None
        self._set_stop_ids(slot, sorted(sequence.request.stop_token_ids))
        for name, column in self.sampling.items():
            column[slot] = getattr(sequence.sampling, name)
        self.add_pages(slot, page_ids)
        self._note_rules(slot, sequence)
        return slot

    def release_slot(self, sequence: Sequence) -> list[int]:
        """Free a request's slot; its tokens go back to it. Returns its pages."""
        slot = sequence.slot
        assert slot is not None
        page_ids: list[int] = self.page_ids[slot, : self.num_pages[slot]].tolist()
        if sequence.finish_reason is None:
            sequence.token_ids = self.token_ids[slot, : self.num_tokens[slot]].tolist()
            sequence.stale_step = int(self.flight_step[slot]) if self.flight_tokens[slot] else None
        self.epoch[slot] = -1
        self.num_pages[slot] = self.flight_tokens[slot] = 0
        self.sequences[slot] = sequence.slot = None
        self._free.append(slot)
        return page_ids

    def set_kept(self, slot: int, num_kept: int) -> None:
        self.num_kept[slot] = num_kept
        self.fills_page_at[slot] = (num_kept + 1) * self._page_size

    def exclude_from_cache(self, slots: Array) -> None:
        """Keep their pages out of the prefix cache: it is off, or logits and so perhaps K/V are not finite."""
        self.fills_page_at[slots] = _NEVER

    def add_pages(self, slot: int, page_ids: Items[int]) -> None:
        start = int(self.num_pages[slot])
        self.page_ids[slot, start : start + len(page_ids)] = page_ids
        self.num_pages[slot] = start + len(page_ids)
        self.note_pages(np.full(len(page_ids), slot), np.arange(start, start + len(page_ids)))

    def note_pages(self, slots: Array, columns: Array) -> None:
        """The device has to learn of these entries of `page_ids`."""
        self._updates.append((slots, columns, self.page_ids[slots, columns]))

    def take_updates(self) -> tuple[PageUpdates, tuple[SlotUpdate, ...]]:
        """Entries of `page_ids` that changed, and slots whose rules did, since the last call."""
        slot_updates, self._slot_updates = self._slot_updates, ()
        return self._take_page_updates(), slot_updates

    def _take_page_updates(self) -> PageUpdates:
        if not self._updates:
            return _NO_PAGES
        parts, self._updates = self._updates, []
        if len(parts) == 1:
            return PageUpdates(slots=parts[0][0], columns=parts[0][1], page_ids=parts[0][2])
        slots, columns, _ = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        width = self.page_ids.shape[1]
        # Each once: a GPU writes them in any order.
        slots, columns = np.divmod(np.unique(slots * width + columns), width)
        return PageUpdates(slots=slots, columns=columns, page_ids=self.page_ids[slots, columns])

    def take_back_updates(self, plan: StepPlan) -> None:
        """Those of a step that did not run."""
        updates = plan.page_updates
        self._updates.insert(0, (updates.slots, updates.columns, updates.page_ids))
        self._slot_updates = plan.slot_updates + self._slot_updates

    def _note_rules(self, slot: int, sequence: Sequence) -> None:
        """The device has to learn of a request with logit rules, and that a slot has none any more."""
        rules = sequence.logit_rules
        if rules is not None or self._has_rules[slot]:
            token_ids = np.array(sequence.token_ids if rules else (), np.int64)
            self._slot_updates += (SlotUpdate(slot=slot, rules=rules, token_ids=token_ids),)
            self._has_rules[slot] = rules is not None

    def commit_rows(self, slots: Array, number: int) -> None:
        """Mark the rows of a step as committed; a later step may be in flight already."""
        committed = slots[self.flight_step[slots] == number]
        self.flight_tokens[committed] = self.flight_candidates[committed] = 0
        self.flight_emits[committed] = False

    # Columns of some slots

    def num_remaining(self, slots: Any) -> Array:
        """Tokens that may still be emitted, as far as steps are committed."""
        remaining: Array = self.max_len[slots] - self.num_tokens[slots]
        return remaining

    def num_sure(self, slots: Any) -> Array:
        """Tokens of the uncommitted row that will be emitted for sure."""
        sure: Array = self.flight_emits[slots].astype(np.int64)
        return sure

    def max_context_len(self, slots: Any) -> Array:
        """context_len, or its maximum after the uncommitted row; of a prompt: the tokens that are planned."""
        lens: Array = self.context_len[slots] + self.flight_tokens[slots]
        return lens

    def num_pending(self, slots: Any) -> Array:
        """Tokens of prompts that no planned step computes."""
        pending: Array = self.num_tokens[slots] - self.max_context_len(slots)
        return pending

    def max_candidates(self, slots: Any) -> Array:
        """Drafts worth verifying next: those that could still be emitted with a bonus token after them."""
        worth = self.num_remaining(slots) - self.num_sure(slots) - 1
        candidates: Array = np.maximum(np.minimum(self.num_drafts[slots], worth), 0)
        return candidates

    def _set_stop_ids(self, slot: int, stop_ids: list[int]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((len(self.stop_ids), len(stop_ids)), NO_TOKEN)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


_NONE = np.zeros(0, np.int64)
_NO_PAGES = PageUpdates(slots=_NONE, columns=_NONE, page_ids=_NONE)
NO_UPDATES: tuple[PageUpdates, tuple[SlotUpdate, ...]] = (_NO_PAGES, ())  # for a step without rows, which does not run
