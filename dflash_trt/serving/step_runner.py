"""Turns of the engine loop: plan, submit, wait, commit.

The plain loop has one step at a time. The chained loop has submitted the next step before it reads the results of the
running one, so that a device with a queue never waits for the host: the next step is assembled on the device from what
this one stores. The tokens are the same, but for near-ties: a request's tokens depend on the request, and roundings on
which requests share a step. `SamplingParams` says what that means in each dtype.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dflash_trt.core.request import TokenEvent
from dflash_trt.core.step_plan import PageCopyError, StepExecutor, StepHandle, StepPlan, StepResult
from dflash_trt.executor.bisection import run_with_bisection
from dflash_trt.executor.stream import StepStream
from dflash_trt.scheduler.data_parallel import StepScheduler
from dflash_trt.scheduler.planner import PlannedStep


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Outcome of a committed step. `elapsed_s` is device time; None if nothing ran or the step failed."""

    events: list[TokenEvent]
    elapsed_s: float | None = None
    has_failed: bool = False


# Called under the lock with each report, before anything else can happen to its requests.
Deliver = Callable[[StepReport], None]


class _FailedStep:
    """The handle of a step that could not be submitted."""

    elapsed_s = 0.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class DeviceLostError(Exception):
    """The executor failed and runs nothing any more."""


class StepRunner:
    """Advances a scheduler with an executor; called from one thread.

    `lock` guards the scheduler; it is free while the device runs. `is_chained` keeps the device's queue filled; an
    executor without a queue gets a `StepStream`.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: StepExecutor,
        *,
        is_chained: bool,
        lock: threading.RLock,
        clock: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self._scheduler = scheduler
        self._device = executor
        self._stream = StepStream(executor) if is_chained and not executor.has_queue else None
        self._executor: StepExecutor = self._stream or executor
        self._is_chained = is_chained
        self._lock = lock
        self._clock = clock
        self._deliver = deliver
        self._submitted: deque[tuple[PlannedStep, StepHandle]] = deque()  # the running one first

    def advance(self) -> bool:
        """One turn; False when there was nothing to do.

        Raises:
            DeviceLostError: the executor cannot go on.
        """
        return self._advance_chained() if self._is_chained else self._advance_plain()

    def close(self) -> None:
        """Wait for what is submitted."""
        self._wait_for_submitted()
        if self._stream is not None:
            self._stream.close()

    def _advance_plain(self) -> bool:
        with self._lock:
            if not self._scheduler.has_work:
                return False
            step = self._scheduler.plan(self._clock())
            if step.is_empty:
                self._report_ended(step)
                return True
        try:
            handle = self._executor.submit(step.plan)
            result = handle.result()
        except Exception as error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            self._recover(step, error)
            return True
        with self._lock:
            events = self._scheduler.commit(step, result, elapsed_s=handle.elapsed_s)
            self._deliver(StepReport(events=events, elapsed_s=handle.elapsed_s))
        return True

    def _advance_chained(self) -> bool:
        with self._lock:
            if not self._submitted and not self._scheduler.has_work:
                return False
            while len(self._submitted) < 2 and self._submit_next():
                pass
        if not self._submitted:
            return True
        step, handle = self._submitted.popleft()
        try:
            result = handle.result()
        except Exception as error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            self._abandon_submitted()
            self._recover(step, error)
            return True
        with self._lock:
            self._scheduler.settle(step, result)
            self._submit_next()
            events = self._scheduler.events(elapsed_s=handle.elapsed_s)
            self._deliver(StepReport(events=events, elapsed_s=handle.elapsed_s))
        return True

    def _submit_next(self) -> bool:
        """Plan a step and queue it; False if nothing could be planned."""
        if not self._scheduler.has_work:
            return False
        step = self._scheduler.plan(self._clock())
        if not step.is_empty:
            self._submitted.append((step, self._submit(step.plan)))
            return True
        if self._submitted:
            self._scheduler.abandon()
        else:
            self._report_ended(step)
        return False

    def _submit(self, plan: StepPlan) -> StepHandle:
        try:
            return self._executor.submit(plan)
        except Exception as error:  # noqa: BLE001 - whatever a device raises fails its requests, in their turn
            return _FailedStep(error)

    def _report_ended(self, step: PlannedStep) -> None:
        """Nothing runs: requests that ended while waiting are reported now."""
        self._deliver(StepReport(events=self._scheduler.commit(step, None)))

    def _abandon_submitted(self) -> None:
        """The step before them failed: they are skipped, and planned anew from what its parts give."""
        self._wait_for_submitted()
        with self._lock:
            while self._submitted:
                self._submitted.pop()
                self._scheduler.abandon()

    def _wait_for_submitted(self) -> None:
        for _, handle in self._submitted:
            with contextlib.suppress(Exception):
                handle.result()

    def _recover(self, step: PlannedStep, error: Exception) -> None:
        """Run a step that failed again in parts, and fail the requests that cannot be computed."""
        can_retry = self._device.can_retry and not isinstance(error, PageCopyError)
        parts = run_with_bisection(self._device, step.plan, error) if can_retry else None
        if parts is None or not self._device.can_retry:
            raise DeviceLostError(f"{type(error).__name__}: {error}") from error
        if self._stream is not None:
            self._stream.resume()
        with self._lock:
            self._settle_parts(step, *parts)

    def _settle_parts(self, step: PlannedStep, result: StepResult, reasons: dict[int, str]) -> None:
        failed = []
        for row, reason in reasons.items():
            sequence = step.sequences[row]
            if sequence.finish_reason is None:
                failed.append(self._scheduler.end(sequence.request_id, "error", reason))
        events = self._scheduler.commit(step, result)
        events += [event for event in failed if event is not None]
        self._deliver(StepReport(events=events, has_failed=True))
