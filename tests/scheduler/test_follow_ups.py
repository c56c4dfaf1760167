"""What a planned step makes of the results before it, and acceptance over finished requests."""

import pytest

from dflash_trt.core.acceptance import acceptance_length, accepted_fractions
from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepSampling
from dflash_trt.core.planned_step import FollowUp, PlannedStep
from dflash_trt.core.request import GenerationOutput, TokenEvent

SAMPLING = StepSampling(temperature=0.5, top_k=3, seed=8)
RESULT = RequestResult(
    emitted_tokens=(5, 6), logprobs=(-1.0, -2.0), num_accepted=1, draft_tokens=(7, 8, 9), next_context_len=6
)


def follow(*, max_candidates: int = 3, num_remaining: int = 20, stop: tuple[int, ...] = ()) -> ScheduledRequest | None:
    row = FollowUp(
        request_id="r",
        max_candidates=max_candidates,
        num_remaining=num_remaining,
        stop_token_ids=frozenset(stop),
        page_ids=(3, 1, 4, 2),
        sampling=SAMPLING,
    )
    batch = PlannedStep(rows=(row,), num_draft_tokens=3, page_size=4).resolve({"r": RESULT})
    return batch.requests[0] if batch.requests else None


def test_a_follow_up_verifies_the_drafts_behind_the_bonus_token() -> None:
    assert follow() == ScheduledRequest(
        request_id="r",
        token_ids=(6, 7, 8, 9),
        context_len=6,
        num_candidates=3,
        page_ids=(3, 1, 4),  # for positions up to 9
        sampling=SAMPLING,
    )


@pytest.mark.parametrize(
    ("max_candidates", "num_remaining", "token_ids"),
    [(2, 20, (6, 7, 8)), (0, 20, (6,)), (3, 5, (6, 7, 8)), (3, 4, (6, 7)), (3, 3, (6,)), (9, 9, (6, 7, 8, 9))],
)
def test_a_follow_up_verifies_no_more_than_can_be_emitted(
    max_candidates: int, num_remaining: int, token_ids: tuple[int, ...]
) -> None:
    row = follow(max_candidates=max_candidates, num_remaining=num_remaining)
    assert row is not None and (row.token_ids, row.num_candidates) == (token_ids, len(token_ids) - 1)


@pytest.mark.parametrize(("num_remaining", "stop"), [(2, ()), (20, (5,)), (20, (6,))])
def test_a_follow_up_of_a_request_that_has_ended_is_dropped(num_remaining: int, stop: tuple[int, ...]) -> None:
    assert follow(num_remaining=num_remaining, stop=stop) is None


def output(*blocks: tuple[int, int], num_tokens: int = 3) -> GenerationOutput:
    """A request whose verify steps had these (candidates, accepted); its first token came after 2 s, the last at 5."""
    return GenerationOutput(
        request_id="r",
        text=None,
        token_ids=(1,) * num_tokens,
        logprobs=(),
        finish_reason="length",
        num_prompt_tokens=1,
        num_verify_steps=len(blocks),
        num_draft_tokens=sum(candidates for candidates, _ in blocks),
        num_accepted_tokens=sum(accepted for _, accepted in blocks),
        num_emitted_by_verify=sum(accepted + 1 for _, accepted in blocks),
        time_to_first_token_s=2.0,
        total_s=5.0,
        steps=tuple(
            TokenEvent(request_id="r", token_ids=(), num_candidates=candidates, num_accepted=accepted)
            for candidates, accepted in ((0, 0), *blocks)
        ),
    )


def test_acceptance_over_requests_weighs_every_verify_step_alike() -> None:
    outputs = [output((3, 3), (3, 0), (1, 1)), output((2, 1)), output()]
    assert acceptance_length(outputs) == (4 + 1 + 2 + 2) / 4
    assert acceptance_length(outputs[2:]) is None and outputs[2].acceptance_length is None
    assert outputs[0].acceptance_length == 7 / 3
    assert accepted_fractions(outputs) == (3 / 4, 1 / 3, 1 / 2)


def test_the_time_between_tokens_leaves_the_first_one_out() -> None:
    assert output(num_tokens=4).inter_token_latency_s == 1.0
    assert output(num_tokens=1).inter_token_latency_s is None
