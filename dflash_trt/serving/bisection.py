"""A step that raises, run again in parts until only the requests that cannot be computed are left out.

Safe because a step's K/V writes depend on its inputs alone: running a row again writes the same values.
"""

from collections.abc import Sequence

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepExecutor, StepResult


def run_with_bisection(
    executor: StepExecutor, batch: StepBatch, error: Exception
) -> tuple[StepBatch, StepResult, dict[str, str]]:
    """The part of `batch` that runs, its result, and why each other request failed, by id.

    `error` is what the whole batch raised. Halves a failing part until it is one request.
    """
    reasons: dict[str, str] = {}
    survivors = _run_parts(executor, batch, batch.requests, error, reasons)
    return (
        StepBatch(requests=tuple(row for row, _ in survivors), num_draft_tokens=batch.num_draft_tokens),
        StepResult(requests=tuple(result for _, result in survivors)),
        reasons,
    )


def _run_parts(
    executor: StepExecutor,
    batch: StepBatch,
    rows: Sequence[ScheduledRequest],
    error: Exception,
    reasons: dict[str, str],
) -> list[tuple[ScheduledRequest, RequestResult]]:
    """Rows of a part known to fail with `error`."""
    if len(rows) == 1:
        reasons[rows[0].request_id] = f"{type(error).__name__}: {error}"
        return []
    middle = len(rows) // 2
    survivors = []
    for half in (rows[:middle], rows[middle:]):
        part = StepBatch(requests=tuple(half), num_draft_tokens=batch.num_draft_tokens)
        try:
            survivors += list(zip(half, executor.step(part).requests, strict=True))
        except Exception as half_error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            survivors += _run_parts(executor, batch, half, half_error, reasons)
    return survivors
