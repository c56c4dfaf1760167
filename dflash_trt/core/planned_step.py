"""A step that may be planned while the step before it still runs.

The synchronous loop plans a step when all of its inputs are known. The overlapped loop plans one step ahead: a request
of the running step is then a FollowUp, whose tokens that step decides. `resolve` fills them in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepResult, StepSampling


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowUp:
    """A verify block that follows a row of the running step: its bonus token, then up to max_candidates of its drafts.

    `num_remaining` tokens are left to emit, those of the running step included. The row is dropped when that step emits
    the last of them or one of `stop_token_ids`. `page_ids` cover the longest outcome.
    """

    request_id: str
    max_candidates: int
    num_remaining: int
    stop_token_ids: frozenset[int]
    page_ids: tuple[int, ...]
    sampling: StepSampling


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """Rows in the order of the batch. `num_draft_tokens` as in StepBatch."""

    rows: tuple[ScheduledRequest | FollowUp, ...]
    num_draft_tokens: int
    page_size: int

    def resolve(self, previous: Mapping[str, RequestResult]) -> StepBatch:
        """Return the batch, given the previous step's results by request id.

        A FollowUp is dropped when its request ended, has no result, or has a result without a bonus token.
        """
        rows = (row if isinstance(row, ScheduledRequest) else self._fill_in(row, previous) for row in self.rows)
        return StepBatch(requests=tuple(row for row in rows if row is not None), num_draft_tokens=self.num_draft_tokens)

    def _fill_in(self, row: FollowUp, previous: Mapping[str, RequestResult]) -> ScheduledRequest | None:
        result = previous.get(row.request_id)
        if result is None or result.non_finite_position is not None:
            return None
        num_remaining = row.num_remaining - len(result.emitted_tokens)
        if num_remaining <= 0 or any(token in row.stop_token_ids for token in result.emitted_tokens):
            return None
        num_candidates = min(row.max_candidates, len(result.draft_tokens), num_remaining - 1)
        token_ids = (result.emitted_tokens[-1], *result.draft_tokens[:num_candidates])
        num_pages = -(-(result.next_context_len + len(token_ids)) // self.page_size)
        return ScheduledRequest(
            request_id=row.request_id,
            token_ids=token_ids,
            context_len=result.next_context_len,
            num_candidates=num_candidates,
            page_ids=row.page_ids[:num_pages],
            sampling=row.sampling,
        )


def results_by_id(batch: StepBatch, result: StepResult) -> dict[str, RequestResult]:
    """Results of a step by request id, for `PlannedStep.resolve`."""
    rows: Iterable[tuple[ScheduledRequest, RequestResult]] = zip(batch.requests, result.requests, strict=True)
    return {row.request_id: row_result for row, row_result in rows}


class StepHandle(Protocol):
    """A submitted step: waiting, running or finished."""

    def result(self) -> tuple[StepBatch, StepResult]:
        """Wait for the step; return the batch that ran and its result.

        Raises:
            StepSkippedError: the step before it failed, so this one did not run.
            Exception: the step's own error.
        """
        ...

    @property
    def batch(self) -> StepBatch:
        """The resolved batch; known once `result` has returned or raised, unless the step was skipped."""
        ...

    @property
    def elapsed_s(self) -> float:
        """Time on the device; known once `result` has returned."""
        ...


class StepPipeline(Protocol):
    """Runs submitted steps in order while the host plans the next one."""

    def submit(self, step: PlannedStep, *, after: StepHandle | None) -> StepHandle:
        """Queue a step. `after` is the last one submitted, which its FollowUps follow."""
        ...

    def close(self) -> None: ...


class StepSkippedError(Exception):
    """A step did not run because the step before it failed. Internal to the engine."""
