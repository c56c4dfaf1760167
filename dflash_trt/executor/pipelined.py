"""A StepExecutor in its own thread, which starts the next step as soon as the running one has finished.

Between two steps only `PlannedStep.resolve` runs; all other work of the host overlaps with the device.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from dflash_trt.core.batch import StepBatch, StepExecutor, StepResult
from dflash_trt.core.planned_step import PlannedStep, StepHandle, StepSkippedError, results_by_id


class ThreadedStep:
    """A submitted step; implements StepHandle."""

    def __init__(self) -> None:
        self.future: Future[StepResult] = Future()
        self.elapsed_s = 0.0
        self._batch: StepBatch | None = None

    @property
    def batch(self) -> StepBatch:
        assert self._batch is not None, "the step has not run"
        return self._batch

    def result(self) -> tuple[StepBatch, StepResult]:
        result = self.future.result()
        return self.batch, result

    def run(self, executor: StepExecutor, step: PlannedStep, after: "ThreadedStep | None") -> None:
        """Called by the pipeline's thread when `after` has finished."""
        try:
            self.future.set_result(self._run(executor, step, after))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.future.set_exception(error)

    def _run(self, executor: StepExecutor, step: PlannedStep, after: "ThreadedStep | None") -> StepResult:
        if after is not None and after.future.exception() is not None:
            raise StepSkippedError("the step before this one failed")
        previous = results_by_id(after.batch, after.future.result()) if after is not None else {}
        self._batch = step.resolve(previous)
        started_s = time.perf_counter()
        result = executor.step(self._batch) if self._batch.requests else StepResult(requests=())
        self.elapsed_s = time.perf_counter() - started_s
        return result


class PipelinedExecutor:
    """Implements StepPipeline. `close` waits for the running step."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-device")

    def submit(self, step: PlannedStep, *, after: StepHandle | None) -> ThreadedStep:
        assert after is None or isinstance(after, ThreadedStep), "a step of another pipeline"
        handle = ThreadedStep()
        self._thread.submit(handle.run, self._executor, step, after)
        return handle

    def close(self) -> None:
        self._thread.shutdown()
