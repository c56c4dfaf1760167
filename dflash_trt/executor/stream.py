"""A queue for an executor that runs steps at once: a thread runs them in order, like a GPU's stream."""

from concurrent.futures import Future, ThreadPoolExecutor

from dflash_trt.core.step_plan import ExecutorLimits, StepExecutor, StepHandle, StepPlan, StepResult, StepSkippedError


class QueuedStep:
    """A submitted step; implements StepHandle."""

    def __init__(self, future: Future[StepHandle]) -> None:
        self._future = future

    def result(self) -> StepResult:
        return self._future.result().result()

    @property
    def elapsed_s(self) -> float:
        return self._future.result().elapsed_s


class StepStream:
    """Implements StepExecutor. Steps after a failed one are skipped until `resume`."""

    has_queue = True

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-device")
        self._has_failed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._executor.limits

    @property
    def can_retry(self) -> bool:
        return self._executor.can_retry

    def submit(self, plan: StepPlan) -> QueuedStep:
        return QueuedStep(self._thread.submit(self._run, plan))

    def resume(self) -> None:
        """Run steps again, after a failure; called when all submitted ones have ended."""
        self._has_failed = False

    def close(self) -> None:
        """Wait for the running step."""
        self._thread.shutdown()

    def _run(self, plan: StepPlan) -> StepHandle:
        if self._has_failed:
            raise StepSkippedError("a step before this one failed")
        try:
            return self._executor.submit(plan)
        except BaseException:
            self._has_failed = True
            raise
