"""Threads for calls of llguidance, which release the interpreter, may take long and cannot be stopped.

The caller waits for a limited time. A thread that is still busy then ends after its call; another takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Final
from weakref import finalize

TIME_LIMIT_S: Final = 1.0  # for which all other requests of the engine may stand still
_NUM_THREADS: Final = min(8, os.cpu_count() or 1)


class LateError(Exception):
    """A call took longer than its limit; it may go on."""


class MaskThreads:
    """Worker threads of one caller at a time."""

    def __init__(self) -> None:
        self._threads = [_MaskThread() for _ in range(_NUM_THREADS)]

    def call_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results in order; the exception where a call raised one, and a LateError where it is late."""
        num_parts = min(len(calls), _NUM_THREADS)
        ends = [len(calls) * i // num_parts for i in range(num_parts + 1)]
        jobs = [self._threads[i].start_job(calls[ends[i] : ends[i + 1]]) for i in range(num_parts)]
        return [result for i, job in enumerate(jobs) for result in self._results(i, job)]

    def _results(self, thread: int, job: _Job) -> list[Any]:
        if job.is_done.wait(TIME_LIMIT_S):
            return job.results
        job.is_abandoned = True
        self._threads[thread] = _MaskThread()
        results = job.results[: len(job.calls) - 1]  # should the last call have ended just now, it was late
        rest = job.calls[len(results) + 1 :]
        others = self._results(thread, self._threads[thread].start_job(rest)) if rest else []
        return [*results, LateError(), *others]


class _Job:
    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self.results: list[Any] = []
        self.is_done = Event()
        self.is_abandoned = False

    def run(self) -> None:
        for call in self.calls:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - the caller's
                result = error
            if self.is_abandoned:
                return
            self.results.append(result)
        self.is_done.set()


class _MaskThread:
    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=_run_jobs, args=(self._jobs,), name="dflash-masks", daemon=True).start()
        finalize(self, self._jobs.put, None)

    def start_job(self, calls: Sequence[Callable[[], Any]]) -> _Job:
        job = _Job(calls)
        self._jobs.put(job)
        return job


def _run_jobs(jobs: SimpleQueue[_Job | None]) -> None:
    while job := jobs.get():
        job.run()
