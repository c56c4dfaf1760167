"""A step that raises, run again in parts until only the requests that cannot be computed are left out.

Safe because a step that raises has stored nothing to its slots, and its K/V writes depend on its inputs alone.
"""

import numpy as np

from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.step_plan import StepExecutor, StepPlan, StepResult

_ROW_ARRAYS = ("emitted_tokens", "emitted_logprobs", "num_accepted", "next_context_lens", "draft_tokens")


def run_with_bisection(executor: StepExecutor, plan: StepPlan, error: Exception) -> tuple[StepResult, dict[int, str]]:
    """The result of `plan`, and why some of its rows have none, by row; their entries are zeros.

    `error` is what the whole plan raised. Halves a failing part until it is one row.
    """
    result = _zeros(plan, has_confidence=executor.limits.has_draft_confidence)
    reasons: dict[int, str] = {}
    _run_parts(executor, plan, slice(0, plan.rows.num_requests), error, result, reasons)
    return result, reasons


def _run_parts(
    executor: StepExecutor, plan: StepPlan, rows: slice, error: Exception, result: StepResult, reasons: dict[int, str]
) -> None:
    """Rows of a part known to fail with `error`."""
    if rows.stop - rows.start == 1:
        reasons[rows.start] = f"{type(error).__name__}: {error}"
        return
    middle = (rows.start + rows.stop) // 2
    for half in (slice(rows.start, middle), slice(middle, rows.stop)):
        try:
            part = executor.submit(plan.part(half)).result()
        except Exception as half_error:  # noqa: BLE001 - whatever a device raises fails its requests, never the engine
            _run_parts(executor, plan, half, half_error, result, reasons)
            continue
        _put(plan, result, half, part)


def _put(plan: StepPlan, result: StepResult, rows: slice, part: StepResult) -> None:
    for name in _ROW_ARRAYS:
        getattr(result, name)[rows] = getattr(part, name)
    if result.draft_confidence is not None and part.draft_confidence is not None:
        result.draft_confidence[rows] = part.draft_confidence
    if result.top is not None and part.top is not None:
        result.top.put(rows, part.top)
    if plan.prompt_rows is not None and result.prompt is not None and part.prompt is not None:
        first, last = plan.rows.token_offsets[[rows.start, rows.stop]].tolist()
        result.prompt.put(plan.prompt_rows.between(first, last), part.prompt)


def _zeros(plan: StepPlan, *, has_confidence: bool) -> StepResult:
    num_requests, width = plan.rows.num_requests, plan.rows.num_draft_tokens + 1
    prompt = plan.prompt_rows
    return StepResult(
        emitted_tokens=np.zeros((num_requests, width), np.int32),
        emitted_logprobs=np.zeros((num_requests, width), np.float32),
        num_accepted=np.zeros(num_requests, np.int32),
        next_context_lens=np.zeros(num_requests, np.int32),
        draft_tokens=np.zeros((num_requests, width - 1), np.int32),
        draft_confidence=np.zeros((num_requests, width - 1), np.float32) if has_confidence and width > 1 else None,
        top=TopTokens.zeros(num_requests, width, plan.top_rows.num_top_logprobs) if plan.top_rows else None,
        prompt=PromptScores.zeros(len(prompt.token_rows), prompt.num_top_logprobs) if prompt else None,
    )
