"""Waiting, running and paused requests, and the moves between them, which allocate and release their pages."""

from bisect import insort

from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.waiting_queue import WaitingQueue


class RequestPool:
    """All requests. `running` is ordered by priority; only running requests hold pages.

    `paused` requests neither run nor wait until they are resumed.
    """

    def __init__(self, store: PageStore, *, max_queue_len: int | None = None) -> None:
        self.store = store
        self.waiting = WaitingQueue(max_queue_len)
        self.running: list[Sequence] = []
        self.paused: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.num_admitted_prompt_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._by_id: dict[str, Sequence] = {}

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

    def num_missing_pages(self, sequence: Sequence) -> int:
        """Number of available pages that admitting `sequence` would take."""
        path = self.store.match(sequence.token_ids, salt=sequence.request.cache_salt)
        num_new = self.store.num_pages_for(len(sequence.token_ids)) - len(path)
        return num_new + self.store.num_idle_among(path)

    def admit(self, sequence: Sequence, now: float) -> None:
        """Run a waiting request, with the cached pages of its prefix and new ones for its other tokens."""
        self.waiting.remove(sequence)
        path = self.store.match(sequence.token_ids, salt=sequence.request.cache_salt)
        held = self.store.hold(path)
        num_new = self.store.num_pages_for(len(sequence.token_ids)) - len(held)
        sequence.page_ids = held + self.store.allocate(num_new)
        sequence.prefix_path = path
        sequence.context_len = len(path) * self.store.page_size
        if sequence.admitted_s is None:
            sequence.admitted_s = now
            sequence.num_prefix_hit_tokens = sequence.context_len
            self.num_admitted_prompt_tokens += len(sequence.token_ids)
            self.num_prefix_hit_tokens += sequence.context_len
        insort(self.running, sequence, key=lambda running: running.priority_key)

    def grow(self, sequence: Sequence, num_positions: int) -> bool:
        """Get pages for `num_positions` if that needs no preemption; return True on success."""
        num_new = self.store.num_pages_for(num_positions) - len(sequence.page_ids)
        if num_new > self.store.num_available:
            return False
        if num_new > 0:
            sequence.page_ids += self.store.allocate(num_new)
        return True

    def keep_full_pages(self, sequence: Sequence) -> None:
        """Cache the committed full pages of a running request."""
        page_size = self.store.page_size
        for index in range(len(sequence.prefix_path), sequence.context_len // page_size):
            node = self.store.keep(
                sequence.prefix_path[-1] if sequence.prefix_path else None,
                sequence.token_ids[index * page_size : (index + 1) * page_size],
                sequence.page_ids[index],
                salt=sequence.request.cache_salt,
            )
            if node is None:
                return
            sequence.page_ids[index] = node.page_id
            sequence.prefix_path.append(node)

    def preempt(self, sequence: Sequence) -> None:
        """Release a running request's pages; it waits to be computed again, emitted tokens included."""
        self.running.remove(sequence)
        self._strip(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Pause a request and release its pages. Full ones stay cached until evicted, so that resuming is cheap."""
        self._take_out(sequence)
        self._strip(sequence)
        self.paused[sequence.request_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Put a paused request back into the queue."""
        del self.paused[sequence.request_id]
        self.waiting.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that has ended."""
        del self._by_id[sequence.request_id]
        self._take_out(sequence)
        self._strip(sequence)

    def check_integrity(self) -> None:
        """Assert that each request is in exactly one place and that pages cover what it has computed."""
        self.store.check_integrity(sequence.page_ids for sequence in self.running)
        places = [*self.running, *self.waiting, *self.paused.values()]
        assert len(places) == len(self._by_id), "a request is in two places, or in none"
        for sequence in places:
            assert self._by_id[sequence.request_id] is sequence
            assert sequence.finish_reason is None, f"request {sequence.request_id} has ended but is still here"
        for sequence in (*self.waiting, *self.paused.values()):
            assert not sequence.page_ids and sequence.context_len == 0, f"{sequence.request_id} waits with pages"
        assert self.running == sorted(self.running, key=lambda running: running.priority_key)
        for sequence in self.running:
            num_positions = len(sequence.page_ids) * self.store.page_size
            assert sequence.context_len <= sequence.max_context_len <= num_positions, (
                f"{sequence.request_id}: context {sequence.context_len} to {sequence.max_context_len}, "
                f"pages for {num_positions}"
            )
            assert sequence.context_len < len(sequence.token_ids), f"{sequence.request_id} has nothing to compute"

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.is_running:
            self.running.remove(sequence)
        elif sequence.request_id in self.paused:
            del self.paused[sequence.request_id]
        else:
            self.waiting.remove(sequence)

    def _strip(self, sequence: Sequence) -> None:
        self.store.release(sequence.page_ids)
        sequence.page_ids = []
        sequence.prefix_path = []
        sequence.context_len = 0
        sequence.draft_tokens = ()
        sequence.epoch += 1
