"""Admission: which waiting request may run next, and whether there is room for it."""

from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.request_pool import RequestPool
from dflash_trt.scheduler.sequence import Sequence


class Admission:
    """Decides over the waiting requests of a pool, and preempts for them."""

    def __init__(self, request_pool: RequestPool, limits: ExecutorLimits, config: SchedulerConfig) -> None:
        self._request_pool = request_pool
        self._limits = limits
        self._config = config

    def next_waiting(self) -> Sequence | None:
        """The first admissible request: none of its steps runs, no other request computes its shared prompt."""
        pool = self._request_pool
        return next(
            (
                waiting
                for waiting in pool.waiting
                if waiting.stale_step is None and not pool.is_prompt_on_its_way(waiting)
            ),
            None,
        )

    def is_full_for(self, sequence: Sequence) -> bool:
        """True if there is no place for the first of those that wait."""
        running = self._request_pool.running
        if len(running) < self._limits.max_batch_size:
            return False
        may_preempt = self._config.preempts_for_priority
        return not may_preempt or sequence.request.priority <= running[-1].request.priority

    def fits(self, sequence: Sequence) -> bool:
        """True if there is room for a waiting request without preemption."""
        return self._fits(sequence, self._request_pool.running, num_freed_pages=0)

    def make_room(self, sequence: Sequence) -> bool:
        """Preempt requests of lower priority if needed; return True if `sequence` fits now."""
        if self.fits(sequence):
            return True
        if not self._config.preempts_for_priority:
            return False
        lower = [
            running for running in self._request_pool.running if running.request.priority < sequence.request.priority
        ]
        staying = self._request_pool.running[: len(self._request_pool.running) - len(lower)]
        if not lower or not self._fits(sequence, staying, num_freed_pages=self._num_own_pages(lower)):
            return False
        while not self.fits(sequence):
            self._request_pool.preempt(self._request_pool.running[-1])
        return True

    def _fits(self, sequence: Sequence, running: list[Sequence], *, num_freed_pages: int) -> bool:
        """True if there are a slot, window pages, and pages for all tokens plus one per running request."""
        if len(running) >= self._limits.max_batch_size:
            return False
        num_available = self._request_pool.store.num_available + num_freed_pages
        if self._request_pool.num_missing_pages(sequence) + len(running) > num_available:
            return False
        return self._request_pool.windows.fits(sequence.max_len, [other.slot for other in running])

    def _num_own_pages(self, sequences: list[Sequence]) -> int:
        """Number of pages that become available when these requests release them."""
        return self._request_pool.store.num_freed_by(map(self._request_pool.page_ids, sequences))
