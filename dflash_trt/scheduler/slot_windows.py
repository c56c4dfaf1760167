"""Pages of running requests in the groups of layers that keep a window of the last tokens.

A request has a claim on the pages that decoding needs, whatever its length, so no window group ever causes preemption.
Unclaimed pages are lent to prompt chunks, which are longer than a verify block. Pages before the committed length are
returned when more are needed: rows of steps that run, or rerun, start at that length or later.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.errors import CapacityError
from dflash_trt.core.step_plan import MAX_KEY_BLOCK, ExecutorLimits, decode_pages, num_pages_for
from dflash_trt.scheduler.prefix_tree import PrefixNode
from dflash_trt.scheduler.slots import SlotTable
from dflash_trt.scheduler.window_pages import WindowPages


class SlotWindows:
    """Window pages of slots; does nothing for a target without windows.

    A decoding slot has pages of every group up to its `num_pages`, a slot in prefill up to its chunk.
    """

    def __init__(self, groups: Sequence[WindowPages], table: SlotTable, limits: ExecutorLimits) -> None:
        """Raises CapacityError: a group has fewer pages than one request needs."""
        self._groups = groups
        self._table = table
        self._limits = limits
        shape = (len(groups), limits.max_batch_size)
        self._first, self._stop = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # indices of pages
        self._claims = np.zeros(shape, np.int64)
        self._num_pages = np.array([group.num_pages for group in groups], np.int64)
        for group, claim in zip(groups, self._claims_of(limits.max_seq_len), strict=True):
            if group.num_pages < claim:
                raise CapacityError.about(
                    f"pages of window {group.window}",
                    expected=f"at least {claim}, for one request",
                    found=str(group.num_pages),
                    hint="Raise the K/V memory budget.",
                )

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    @property
    def num_pages_in_use(self) -> int:
        """Pages in use in all groups."""
        return sum(group.num_in_use for group in self._groups)

    # Requests

    def fits(self, max_len: int, staying: Iterable[int | None]) -> bool:
        """True if a request of `max_len` tokens may claim its pages in addition to the slots `staying`."""
        if not self._groups:
            return True
        taken = self._taken()[:, [slot for slot in staying if slot is not None]].sum(1)
        return bool((taken + self._claims_of(max_len) <= self._num_pages).all())

    def claim_pages(self, slot: int, path: Sequence[PrefixNode], max_len: int) -> None:
        """Claim pages for a request with a new slot; its prefix `path` has the pages of the last window."""
        for g, group in enumerate(self._groups):
            first = group.first_page(len(path) * self._limits.page_size)
            page_ids = group.retain(path[first:])
            self._first[g, slot], self._stop[g, slot] = first, len(path)
            self._blank(g, slot, max(0, first - num_pages_for(MAX_KEY_BLOCK, self._limits.page_size)), first)
            self._set(g, np.full(len(page_ids), slot), np.arange(first, len(path)), page_ids)
        if self._groups:
            self._claims[:, slot] = self._claims_of(max_len)

    def release_pages(self, slot: int) -> None:
        """Release all pages of a slot."""
        for g, group in enumerate(self._groups):
            group.release(self._page_ids(g, slot))
        self._first[:, slot] = self._stop[:, slot] = self._claims[:, slot] = 0

    # Pages

    def passed(self, slots: Array) -> Array:
        """The slots that have pages before their windows."""
        page_size, has_passed = self._limits.page_size, np.zeros(len(slots), bool)
        for g, group in enumerate(self._groups):
            starts = np.maximum(self._table.context_len[slots] - group.window + 1, 0)
            has_passed |= np.minimum(starts // page_size, self._stop[g, slots]) > self._first[g, slots]
        return slots[has_passed]

    def release_passed_pages(self, slot: int, *, num_prompt_tokens: int) -> None:
        """Release the pages before the windows of a slot.

        Pages of the prompt stay cached for requests with the same prefix. No request begins inside an answer.
        """
        num_prompt_pages = num_prompt_tokens // self._limits.page_size
        for g, group in enumerate(self._groups):
            start = int(self._first[g, slot])
            first = min(group.first_page(int(self._table.context_len[slot])), int(self._stop[g, slot]))
            if first > start:
                passed, of_prompt = self._page_ids(g, slot)[: first - start], max(0, num_prompt_pages - start)
                group.release(passed[:of_prompt])
                group.release(passed[of_prompt:], are_next=True)
                self._first[g, slot] = first
                self._blank(g, slot, start, first)

    def may_add(self, slots: Array, counts: Array) -> bool:
        """True if every group has `counts` more pages for these slots."""
        held = (self._stop - self._first)[:, slots]
        claims = self._claims[:, slots]
        lent = np.maximum(held + counts, claims) - np.maximum(held, claims)
        return not lent.any() or bool((self._taken().sum(1) + lent.sum(1) <= self._num_pages).all())

    def add(self, slots: Array, counts: Array) -> None:
        """Give each of these slots `counts` more pages of every group; check `may_add` first."""
        total, rows = int(counts.sum()), np.repeat(slots, counts)
        in_run = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        for g, group in enumerate(self._groups):
            self._set(g, rows, self._stop[g, rows] + in_run, group.allocate(total))
            self._stop[g, slots] += counts

    def lend_pages(self, slot: int, start: int, num_tokens: int) -> int:
        """Lend pages to a chunk from `start` on; returns its tokens that have pages, at most `num_tokens`."""
        page_size = self._limits.page_size
        for g in range(len(self._groups)):
            held = int(self._stop[g, slot] - self._first[g, slot])
            spare = int(self._num_pages[g] - self._taken()[g].sum())
            most = max(held, int(self._claims[g, slot])) + spare - held
            num_tokens = min(num_tokens, (int(self._stop[g, slot]) + most) * page_size - start)
        if num_tokens <= 0:
            return 0
        stop = num_pages_for(start + num_tokens, page_size)
        for g, group in enumerate(self._groups):
            columns = np.arange(self._stop[g, slot], stop)
            self._set(g, np.full(len(columns), slot), columns, group.allocate(len(columns)))
            self._stop[g, slot] = max(stop, int(self._stop[g, slot]))
        return num_tokens

    def cache_page(self, slot: int, column: int, node: PrefixNode) -> None:
        """Make a slot's page the node's: cache its window pages with the node, too."""
        for g, group in enumerate(self._groups):
            if not self._first[g, slot] <= column < self._stop[g, slot]:
                continue
            place = (slot, self._column(g) + column)
            page_id = int(self._table.page_ids[place])
            kept = group.insert(node, page_id)
            if kept != page_id:
                self._set(g, np.array([slot]), np.array([column]), [kept])

    def check_integrity(self, running: Sequence[int]) -> None:
        """Assert that pages cover what is read and written, and that claims are met."""
        table, page_size = self._table, self._limits.page_size
        for g, group in enumerate(self._groups):
            group.check_integrity([self._page_ids(g, slot) for slot in running])
            for slot in running:
                first, stop = int(self._first[g, slot]), int(self._stop[g, slot])
                assert first <= group.first_page(int(table.context_len[slot])), "a page left before its window"
                assert int(table.max_context_len(slot)) <= stop * page_size, "pages do not cover the planned rows"
                assert not table.is_decoding[slot] or stop == table.num_pages[slot]
            assert self._taken()[g].sum() <= group.num_pages, "more pages are claimed than there are"
        free = np.setdiff1d(np.arange(self._limits.max_batch_size), running)
        assert not self._claims[:, free].any() and not self._stop[:, free].any()

    # Inside

    def _claims_of(self, max_len: int) -> Array:
        """Pages that decoding needs of each group: a window and two verify blocks, or the whole request."""
        limits = self._limits
        page_size, max_draft_len = limits.page_size, limits.max_draft_len
        most = num_pages_for(min(max_len + max_draft_len + 1, limits.max_positions), page_size)
        claims = [min(most, decode_pages(group.window, page_size, max_draft_len)) for group in self._groups]
        return np.array(claims, np.int64)

    def _taken(self) -> Array:
        """int64 [G, S]: pages that a slot has or may claim."""
        taken: Array = np.maximum(self._stop - self._first, self._claims)
        return taken

    def _column(self, g: int) -> int:
        """Column of the group's first page in the page table."""
        return (g + 1) * self._limits.max_pages

    def _page_ids(self, g: int, slot: int) -> list[int]:
        first, stop = self._column(g) + self._first[g, slot], self._column(g) + self._stop[g, slot]
        page_ids: list[int] = self._table.page_ids[slot, first:stop].tolist()
        return page_ids

    def _blank(self, g: int, slot: int, start: int, stop: int) -> None:
        """The pages of a slot from `start` to `stop` are gone."""
        blank_page = self._limits.page_windows[g].blank_page
        self._set(g, np.full(stop - start, slot), np.arange(start, stop), [blank_page] * (stop - start))

    def _set(self, g: int, slots: Array, columns: Array, page_ids: Sequence[int]) -> None:
        if len(slots):
            columns = self._column(g) + columns
            self._table.page_ids[slots, columns] = page_ids
            self._table.note_pages(slots, columns)
