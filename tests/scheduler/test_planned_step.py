"""Rows whose tokens the running step decides."""

from dataclasses import replace

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepSampling
from dflash_trt.core.planned_step import FollowUp, PlannedStep

FOLLOW_UP = FollowUp(
    request_id="r",
    max_candidates=3,
    num_remaining=10,
    stop_token_ids=frozenset({99}),
    page_ids=(7, 8, 9),
    sampling=StepSampling(seed=5),
)
RESULT = RequestResult(
    emitted_tokens=(21, 22), logprobs=(), num_accepted=1, draft_tokens=(31, 32, 33, 34), next_context_len=4
)


def resolve(row: FollowUp, result: RequestResult | None) -> ScheduledRequest | None:
    step = PlannedStep(rows=(row,), num_draft_tokens=4, page_size=4)
    batch = step.resolve({} if result is None else {"r": result})
    assert batch.num_draft_tokens == 4
    return batch.requests[0] if batch.requests else None


def test_the_bonus_token_becomes_the_anchor_and_drafts_follow_it() -> None:
    row = resolve(FOLLOW_UP, RESULT)
    assert row is not None
    assert row.token_ids == (22, 31, 32, 33)
    assert (row.context_len, row.num_candidates, row.sampling) == (4, 3, StepSampling(seed=5))


def test_only_the_pages_that_the_outcome_needs_are_given() -> None:
    row = resolve(FOLLOW_UP, RESULT)
    assert row is not None and row.page_ids == (7, 8)


def test_no_more_drafts_are_verified_than_can_be_emitted_with_a_bonus() -> None:
    row = resolve(replace(FOLLOW_UP, num_remaining=4), RESULT)
    assert row is not None and row.num_candidates == 1


def test_the_row_is_dropped_when_the_request_ended_or_did_not_run() -> None:
    assert resolve(replace(FOLLOW_UP, num_remaining=2), RESULT) is None
    assert resolve(FOLLOW_UP, replace(RESULT, emitted_tokens=(99, 22))) is None
    assert resolve(FOLLOW_UP, None) is None


def test_a_step_with_fewer_drafts_than_expected_is_followed_by_those_there_are() -> None:
    row = resolve(FOLLOW_UP, replace(RESULT, draft_tokens=(31,)))
    assert row is not None and row.token_ids == (22, 31)
