"""The plain loop: schedule, step, commit, one step at a time."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.batch import StepBatch, StepExecutor, StepResult
from dflash_trt.core.request import TokenEvent
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.bisection import run_with_bisection


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Outcome of a committed step. `elapsed_s` is the device's time; None if nothing ran, or the step failed."""

    events: list[TokenEvent]
    elapsed_s: float | None = None
    has_failed: bool = False


# Called under the lock with each report, before anything else can happen to its requests.
Deliver = Callable[[StepReport], None]


class StepRunner(Protocol):
    """Advances a scheduler with an executor. The engine loop calls it from one thread."""

    def advance(self) -> bool:
        """One turn; False when there was nothing to do."""
        ...

    def close(self) -> None:
        """Give back what belongs to the runner."""
        ...


class PlainRunner:
    """`lock` guards the scheduler; it is free while the device runs."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        lock: threading.RLock,
        clock: Callable[[], float],
        deliver: Deliver,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._lock = lock
        self._clock = clock
        self._deliver = deliver

    def advance(self) -> bool:
        with self._lock:
            if not self._scheduler.has_work:
                return False
            batch = self._scheduler.schedule(self._clock())
        reasons: dict[str, str] = {}
        started_s = time.perf_counter()
        elapsed_s: float | None = None
        try:
            if batch.requests:
                result = self._executor.step(batch)
                elapsed_s = time.perf_counter() - started_s
            else:
                result = StepResult(requests=())
        except Exception as error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            batch, result, reasons = run_with_bisection(self._executor, batch, error)
        with self._lock:
            self._deliver(settle(self._scheduler, batch, result, reasons, elapsed_s))
        return True

    def close(self) -> None:
        """Nothing is held."""


def settle(
    scheduler: Scheduler, batch: StepBatch, result: StepResult, reasons: dict[str, str], elapsed_s: float | None
) -> StepReport:
    """Commit the rows that ran and fail those that could not, by request id."""
    failed = [scheduler.fail(request_id, reason) for request_id, reason in reasons.items()]
    events = scheduler.commit(batch, result, elapsed_s=elapsed_s)
    events += [event for event in failed if event is not None]
    return StepReport(events=events, elapsed_s=elapsed_s, has_failed=bool(reasons))
