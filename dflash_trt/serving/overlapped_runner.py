"""The overlapped loop: step n+1 is planned while the device runs step n, whose results are read one turn later.

The same tokens as the plain loop, but for near-ties: a request's tokens depend on the request, and roundings on which
requests share a step. `SamplingParams` says what that means in each dtype.
"""

import contextlib
import threading
from collections.abc import Callable

from dflash_trt.core.batch import StepExecutor, StepResult
from dflash_trt.core.planned_step import StepHandle, StepPipeline, StepSkippedError
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.bisection import run_with_bisection
from dflash_trt.serving.step_runner import Deliver, settle


class OverlappedRunner:
    """`pipeline` runs steps; `executor` is the same device, used alone when a failed step is run again in parts."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        pipeline: StepPipeline,
        *,
        lock: threading.RLock,
        clock: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._pipeline = pipeline
        self._lock = lock
        self._clock = clock
        self._deliver = deliver
        self._running: StepHandle | None = None

    def advance(self) -> bool:
        running = self._running
        with self._lock:
            if running is None and not self._scheduler.has_work:
                return False
            following = self._submit_next(running)
        if running is not None:
            following = self._finish(running, following)
        self._running = following
        return True

    def close(self) -> None:
        self._pipeline.close()

    def _submit_next(self, running: StepHandle | None) -> StepHandle | None:
        """Plan the step after `running` and queue it; None when nothing could be planned."""
        step = self._scheduler.plan(self._clock())
        if step.rows:
            return self._pipeline.submit(step, after=running)
        if running is not None:
            self._scheduler.abandon()
        else:  # nothing runs: what ended in the queue is told now
            self._deliver(settle(self._scheduler, step.resolve({}), StepResult(requests=()), {}, None))
        return None

    def _finish(self, running: StepHandle, following: StepHandle | None) -> StepHandle | None:
        """Wait for `running` and commit it; the step that is running then."""
        reasons: dict[str, str] = {}
        elapsed_s: float | None = None
        try:
            batch, result = running.result()
            elapsed_s = running.elapsed_s if batch.requests else None
        except Exception as error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            self._give_up(following)
            following = None
            batch, result, reasons = run_with_bisection(self._executor, running.batch, error)
        with self._lock:
            self._deliver(settle(self._scheduler, batch, result, reasons, elapsed_s))
        return following

    def _give_up(self, following: StepHandle | None) -> None:
        """The step before `following` failed: it is skipped, and planned anew from what the parts give."""
        if following is None:
            return
        with contextlib.suppress(StepSkippedError):
            following.result()
        with self._lock:
            self._scheduler.abandon()
