"""Waiting, running and paused requests. Moves between these states allocate and release pages."""

import logging
from bisect import insort
from collections.abc import Iterator

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.errors import QueueFullError
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.prefix_tree import PrefixNode
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.slot_states import SlotStates
from dflash_trt.scheduler.slot_windows import SlotWindows
from dflash_trt.scheduler.slots import SlotTable

_LOG = logging.getLogger(__name__)


class RequestPool:
    """All requests. `running` is ordered by priority.

    Only running requests hold pages and a slot in `table`. `paused` requests neither run nor wait until they are
    resumed.
    """

    def __init__(
        self, store: PageStore, table: SlotTable, windows: SlotWindows, *, max_queue_len: int | None = None
    ) -> None:
        self.store = store
        self.table = table
        self.windows = windows
        self.states = SlotStates(store.snapshots, num_slots=len(table.sequences), page_size=store.page_size)
        self.waiting = WaitingQueue(max_queue_len)
        self.running: list[Sequence] = []
        self.paused: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.num_admitted_prompt_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._by_id: dict[str, Sequence] = {}
        self.version = 0  # changes when a request leaves `running`
        self._running_slots: Array | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def request_ids(self) -> set[str]:
        return set(self._by_id)

    def find(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def enqueue(self, sequence: Sequence) -> None:
        """Take a new arrival.

        Raises:
            QueueFullError: too many wait.
        """
        self.waiting.add(sequence)
        self._by_id[sequence.request_id] = sequence

    def adopt(self, sequence: Sequence) -> None:
        """Take a waiting request that another pool has removed."""
        self.waiting.put_back(sequence)
        self._by_id[sequence.request_id] = sequence

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """Tokens that a waiting request has to compute; another sample of its prompt computes them for both."""
        if sequence.request.shares_prompt_of in self._by_id:
            return 1
        path, _ = self._cached_prefix(sequence)
        return len(sequence.token_ids) - len(path) * self.store.page_size

    def num_missing_pages(self, sequence: Sequence) -> int:
        """Number of available pages that admitting `sequence` would take."""
        path, _ = self._cached_prefix(sequence)
        num_there = sum(node.page_id is not None for node in path)
        return self.store.num_pages_for(len(sequence.token_ids)) - num_there + self.store.num_idle_among(path)

    def is_prompt_on_its_way(self, sequence: Sequence) -> bool:
        """True while another sample of the prompt computes full pages that `sequence` will share."""
        request_id = sequence.request.shares_prompt_of
        if request_id is None or not self.store.keeps_prefixes:
            return False
        other = self.find(request_id)
        if other is None or other.slot is None:
            return False
        num_shared = (len(sequence.request.prompt_token_ids) - 1) // self.store.page_size
        return bool(self.table.num_kept[other.slot] < num_shared)

    @property
    def running_slots(self) -> Array:
        """int64, of `running` in its order."""
        if self._running_slots is None:
            self._running_slots = np.array([sequence.slot for sequence in self.running], np.int64)
        return self._running_slots

    def admit(self, sequence: Sequence, now: float) -> None:
        """Run a waiting request, with the cached pages of its prefix and new ones for its other tokens."""
        self.waiting.remove(sequence)
        path, num_cached_pages = self._cached_prefix(sequence)
        num_tokens = len(sequence.token_ids)
        with self.store.host.pinned(path):
            held = self.store.retain(path)
            num_new = self.store.num_pages_for(num_tokens) - len(held)
            slot = self.table.assign_slot(sequence, held + self.store.allocate(num_new), num_kept=len(path))
            self.windows.claim_pages(slot, path, sequence.max_len)
            self.states.assign_snapshots(slot, path, num_cached_pages=num_cached_pages, num_tokens=num_tokens)
            self.store.publish(path)
        sequence.prefix_path = path
        context_len = len(path) * self.store.page_size
        self.table.context_len[slot] = context_len
        if sequence.admitted_s is None:
            sequence.admitted_s = now
            sequence.num_prefix_hit_tokens = context_len
            self.num_admitted_prompt_tokens += num_tokens
            self.num_prefix_hit_tokens += context_len
        insort(self.running, sequence, key=lambda running: running.priority_key)
        self._running_slots = None

    def grow(self, slot: int, num_positions: int) -> bool:
        """Get pages for `num_positions` if that needs no preemption; return True on success."""
        num_new = self.store.num_pages_for(num_positions) - int(self.table.num_pages[slot])
        return self.grow_all(np.array([slot]), np.array([num_new]))

    def grow_all(self, slots: Array, num_new: Array) -> bool:
        """Allocate `num_new` more pages of every group for each of these decoding slots.

        Returns False if that needs preemption.
        """
        needy = np.flatnonzero(num_new > 0)
        if not len(needy):
            return True
        counts, grown, table = num_new[needy], slots[needy], self.table
        total = int(counts.sum())
        if total > self.store.num_available:
            return False
        if self.windows.has_groups:
            self._leave_windows(grown)
            if not self.windows.may_add(grown, counts):
                return False
            self.windows.add(grown, counts)
        page_ids = np.array(self.store.allocate(total))
        rows = np.repeat(grown, counts)
        columns = table.num_pages[rows] + np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        table.page_ids[rows, columns] = page_ids
        table.num_pages[grown] += counts
        table.note_pages(rows, columns)
        return True

    def lend_pages(self, slot: int, start: int, num_tokens: int) -> int:
        """Tokens of a prompt's chunk, at most `num_tokens`, that layers with windows have pages for now."""
        if not self.windows.has_groups:
            return num_tokens
        self._leave_windows(np.array([slot]))
        return self.windows.lend_pages(slot, start, num_tokens)

    def prompt_chunks(self, slots: Array, budget: int, *, max_scores: int | None) -> list[tuple[int, int]]:
        """(slot, tokens) of each prompt chunk of a step: of `slots` in their order, while `budget` tokens last.

        A chunk ends where the recurrent state of its slot is to be saved, where layers with windows have no more
        pages for it now, or where `max_scores` log probabilities of prompts are wanted, though more would fit. Its
        pages are lent.
        """
        chunks = []
        starts, num_pending = self.table.max_context_len(slots).tolist(), self.table.num_pending(slots).tolist()
        for slot, start, pending in zip(slots.tolist(), starts, num_pending, strict=True):
            if budget <= 0:
                break
            num_tokens = min(pending, budget)
            if max_scores is not None and self._num_scores(slot, start, num_tokens):
                num_tokens = min(num_tokens, max_scores)
            num_tokens = self.states.chunk_len(slot, start, num_tokens) if num_tokens else 0
            num_tokens = self.lend_pages(slot, start, num_tokens) if num_tokens else 0
            if num_tokens:
                chunks.append((slot, num_tokens))
                budget -= num_tokens
                max_scores = None if max_scores is None else max_scores - self._num_scores(slot, start, num_tokens)
        return chunks

    def _num_scores(self, slot: int, start: int, num_tokens: int) -> int:
        """Log probabilities that a prompt chunk is to give."""
        sequence = self.table.sequences[slot]
        collected = None if sequence is None else sequence.prompt_logprobs
        return 0 if collected is None else collected.num_wanted(start, num_tokens)

    def may_need_less(self, slot: int) -> bool:
        """True if the next row of a slot may do with fewer pages once its uncommitted one is committed."""
        counts = self.table.flight_tokens if self.windows.has_groups else self.table.flight_candidates
        return bool(counts[slot])

    def _leave_windows(self, slots: Array) -> None:
        """Cache and release the pages that the windows of these slots have passed."""
        for slot in self.windows.passed(slots).tolist():
            sequence = self.table.sequences[slot]
            assert sequence is not None, "a slot without a request has no pages"
            if self.table.context_len[slot] >= self.table.fills_page_at[slot]:
                self.cache_full_pages(sequence)
            self.windows.release_passed_pages(slot, num_prompt_tokens=len(sequence.request.prompt_token_ids))

    def cache_full_pages(self, sequence: Sequence) -> None:
        """Cache the committed full pages of a running request. A failure costs time, but no request."""
        try:
            self._cache_full_pages(sequence)
        except Exception:  # noqa: BLE001
            _LOG.exception("request %s: its pages could not be cached", sequence.request_id)

    def _cache_full_pages(self, sequence: Sequence) -> None:
        table, slot, page_size = self.table, sequence.slot, self.store.page_size
        assert slot is not None
        for index in range(int(table.num_kept[slot]), int(table.context_len[slot]) // page_size):
            page_id = int(table.page_ids[slot, index])
            node = self.store.insert(
                sequence.prefix_path[-1] if sequence.prefix_path else None,
                table.token_ids[slot, index * page_size : (index + 1) * page_size].tolist(),
                page_id,
                salt=sequence.request.cache_salt,
            )
            if node is None:
                table.exclude_from_cache(np.array([slot]))
                return
            if node.page_id != page_id:
                assert node.page_id is not None
                table.page_ids[slot, index] = node.page_id
                table.note_pages(np.array([slot]), np.array([index]))
            self.windows.cache_page(slot, index, node)
            sequence.prefix_path.append(node)
            table.set_kept(slot, index + 1)
            self.states.cache_snapshot(slot, (index + 1) * page_size, node)
            if self.store.host.publishes_all and (index + 1) * page_size <= len(sequence.request.prompt_token_ids):
                self.store.publish([node])

    def page_ids(self, sequence: Sequence) -> list[int]:
        """Pages of a running request."""
        page_ids: list[int] = self.table.page_ids[sequence.slot, : self.table.num_pages[sequence.slot]].tolist()
        return page_ids

    def preempt(self, sequence: Sequence) -> None:
        """Release a running request's pages; it waits to be computed again, emitted tokens included."""
        self._take_out(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Pause a request and release its pages. Full ones stay cached until evicted, so resuming is cheap."""
        self._take_out(sequence)
        self.paused[sequence.request_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Put a paused request back into the queue."""
        del self.paused[sequence.request_id]
        self.waiting.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that has ended."""
        del self._by_id[sequence.request_id]
        self._take_out(sequence)

    def check_integrity(self) -> None:
        """Assert that each request is in exactly one place and that pages cover what it has computed."""
        table, page_size = self.table, self.store.page_size
        self.store.check_integrity([self.page_ids(sequence) for sequence in self.running])
        self.states.check_integrity(np.flatnonzero(table.epoch < 0))
        self.windows.check_integrity(self.running_slots.tolist())
        places = [*self.running, *self.waiting, *self.paused.values()]
        assert len(places) == len(self._by_id), "a request is in two places, or in none"
        for sequence in places:
            assert self._by_id[sequence.request_id] is sequence
            assert sequence.finish_reason is None, f"request {sequence.request_id} has ended but is still here"
        for sequence in (*self.waiting, *self.paused.values()):
            assert sequence.slot is None and not sequence.prefix_path, f"{sequence.request_id} waits with a slot"
        assert self.running == sorted(self.running, key=lambda running: running.priority_key)
        assert self.running_slots.tolist() == [sequence.slot for sequence in self.running]
        assert int((table.epoch >= 0).sum()) == len(self.running), "a slot without a request"
        for sequence in self.running:
            slot = sequence.slot
            assert slot is not None and table.sequences[slot] is sequence
            num_tokens, context_len = int(table.num_tokens[slot]), int(table.context_len[slot])
            num_positions = int(table.num_pages[slot]) * page_size
            assert context_len <= table.max_context_len(slot) <= num_positions, (
                f"{sequence.request_id}: context {context_len} to {table.max_context_len(slot)}, "
                f"pages for {num_positions}"
            )
            assert context_len < num_tokens <= sequence.max_len, f"{sequence.request_id} has nothing to compute"
            assert table.num_kept[slot] == len(sequence.prefix_path)

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[PrefixNode], int]:
        """The prefix that `sequence` may reuse, and how many of its pages are cached.

        None of them while the request needs the logits of its prompt.
        """
        if sequence.prompt_logprobs is not None and not sequence.prompt_logprobs.is_complete:
            return [], 0
        path = self.store.match(sequence.token_ids, salt=sequence.request.cache_salt)
        return self.store.with_state(path), len(path)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.is_running:
            self.running.remove(sequence)
            self._running_slots, self.version = None, self.version + 1
            assert sequence.slot is not None
            self.states.release_snapshots(sequence.slot)
            self.windows.release_pages(sequence.slot)
            self.store.release(self.table.release_slot(sequence))
            sequence.prefix_path = []
        elif sequence.request_id in self.paused:
            del self.paused[sequence.request_id]
        else:
            self.waiting.remove(sequence)


class WaitingQueue:
    """Requests that wait for a place, ordered by priority, then arrival.

    A full queue refuses new arrivals, but not preempted requests.
    """

    def __init__(self, max_len: int | None = None) -> None:
        self._max_len = max_len
        self._sequences: list[Sequence] = []
        self._timed: list[Sequence] = []  # those that may wait only so long

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Add a new arrival.

        Raises:
            QueueFullError: max_len requests are waiting.
        """
        check_queue(sequence, len(self._sequences), max_len=self._max_len)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted request, before those that arrived after it."""
        insort(self._sequences, sequence, key=lambda waiting: waiting.priority_key)
        if sequence.request.queue_timeout_s is not None and sequence.admitted_s is None:
            self._timed.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        if sequence in self._timed:
            self._timed.remove(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Requests whose queue_timeout_s has passed before their first step."""
        waited = ((sequence, sequence.request.queue_timeout_s, now - sequence.arrived_s) for sequence in self._timed)
        return [sequence for sequence, most_s, waited_s in waited if most_s is not None and waited_s >= most_s]


def check_queue(sequence: Sequence, num_waiting: int, *, max_len: int | None) -> None:
    """Raises QueueFullError: a new arrival is one too many."""
    if max_len is not None and num_waiting >= max_len:
        raise QueueFullError.about(
            f"request {sequence.request_id!r}",
            expected=f"fewer than {max_len} waiting requests",
            found=str(num_waiting),
            hint="Try again later, or raise max_queue_len.",
        )
