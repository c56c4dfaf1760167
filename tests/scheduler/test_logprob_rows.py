"""Log probabilities that requests want beside those of their tokens: each gets its own, and a step gives no more."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from tests.fake_executor import FakeExecutor, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request

RANK = 1000  # added to a token's id for each rank: more than the vocabulary has


class ScoringExecutor(FakeExecutor):
    """The n-th most likely token at a place is the place's own + n * RANK; a log probability is minus the position."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver.executor.limits, draft_rule=right_with_probability(0.6))
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> FinishedStep:
        self.plans.append(plan)
        result = super().submit(plan).result()
        if plan.top_rows is not None:
            top = self._top(result.emitted_tokens, plan.top_rows.num_top_logprobs)
            others = np.setdiff1d(np.arange(plan.rows.num_requests), plan.top_rows.requests)
            top.token_ids[others] = -1
            result = replace(result, top=top)
        if plan.prompt_rows is not None:
            rows, prompt = plan.rows, plan.prompt_rows
            requests = np.searchsorted(rows.token_offsets, prompt.token_rows, side="right") - 1
            positions = rows.context_lens[requests] + prompt.token_rows - rows.token_offsets[requests]
            scores = PromptScores(-positions, self._top(prompt.next_tokens, prompt.num_top_logprobs))
            result = replace(result, prompt=scores)
        return FinishedStep(lambda: result)

    def _top(self, token_ids: np.ndarray, num_top_logprobs: int) -> TopTokens:
        ranked = token_ids[..., None] + RANK * np.arange(num_top_logprobs)
        return TopTokens(ranked, -ranked.astype(np.float32))


REQUESTS = {
    name: make_request(
        name, prompt, max_new_tokens=14, seed=seed, logprobs=top > 0, top_logprobs=top, prompt_logprobs=of_prompt
    )
    for seed, (name, prompt, top, of_prompt) in enumerate(
        [
            ("neither", range(9), 0, None),
            ("tokens", range(9), 3, None),
            ("prompt", range(9), 0, 2),
            ("both", range(20, 33), 1, 4),
            ("prompt without alternatives", range(9), 0, 0),
            ("prompt of one token", [5], 2, 1),
        ]
    )
}


def scoring_driver(**config: bool) -> Driver:
    driver = make_driver(make_limits(max_batch_size=3, max_num_tokens=10, num_pages=30), **config)
    driver.executor = ScoringExecutor(driver)
    return driver


def check(driver: Driver, request: Request) -> None:
    events = [event for event in driver.events if event.request_id == request.request_id]
    assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    for event in events:
        wanted = request.sampling.top_logprobs
        assert len(event.logprobs) == (len(event.token_ids) if request.sampling.logprobs else 0)
        expected = [[token + RANK * rank for rank in range(wanted)] for token in event.token_ids]
        assert (event.top.token_ids.tolist() if event.top is not None else []) == (expected if wanted else [])
    of_prompt = request.sampling.prompt_logprobs
    told = [event.prompt for event in events if event.prompt is not None]
    assert (events[0].prompt is not None, len(told)) == (of_prompt is not None, of_prompt is not None)
    if of_prompt is not None:
        prompt = request.prompt_token_ids
        assert (-told[0].logprobs).tolist() == list(range(len(prompt) - 1))
        assert told[0].top.token_ids.tolist() == [
            [token + RANK * rank for rank in range(of_prompt)] for token in prompt[1:]
        ]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("preempted_after", [None, 1, 2, 3, 5])
def test_each_request_gets_what_it_wants_also_when_it_begins_again(preempted_after: int | None, is_ahead: bool) -> None:
    """In chunks, beside others that want more or less, and once however often its prompt is computed."""
    driver = scoring_driver()
    driver.add(make_request("before", range(9)))
    driver.run()  # the pages of its prompt are cached
    for request in REQUESTS.values():
        driver.add(request)
    if preempted_after is not None:
        for _ in range(preempted_after):
            driver.step_ahead() if is_ahead else driver.step()
        for name in REQUESTS:
            driver.scheduler.preempt(name)
    driver.run(ahead=is_ahead)
    for request in REQUESTS.values():
        check(driver, request)


def test_a_step_gives_what_the_request_in_it_that_wants_most_does_and_no_more() -> None:
    driver = scoring_driver()
    for request in REQUESTS.values():
        driver.add(request)
    driver.run()
    wanted = set()
    for plan in driver.executor.plans:  # type: ignore[attr-defined]
        if plan.top_rows is not None:
            tops = [REQUESTS[plan.rows.request_ids[row]].sampling.top_logprobs for row in plan.top_rows.requests]
            assert plan.top_rows.num_top_logprobs == max(tops) and min(tops) > 0
            wanted.add(plan.top_rows.num_top_logprobs)
        if plan.prompt_rows is not None:
            rows = np.searchsorted(plan.rows.token_offsets, plan.prompt_rows.token_rows, side="right") - 1
            most = max(REQUESTS[plan.rows.request_ids[row]].sampling.prompt_logprobs or 0 for row in rows)
            assert plan.prompt_rows.num_top_logprobs == most
    assert wanted >= {1, 3}


@pytest.mark.parametrize(("enable_prefix_caching", "start"), [(True, 8), (False, 0)])
def test_a_prompt_is_scored_once_though_it_is_computed_again(enable_prefix_caching: bool, start: int) -> None:
    """The second time it takes the cached pages."""
    driver = scoring_driver(enable_prefix_caching=enable_prefix_caching)
    driver.add(REQUESTS["prompt"])
    driver.step()
    driver.step()
    driver.scheduler.preempt("prompt")
    driver.run()
    plans = driver.executor.plans  # type: ignore[attr-defined]
    assert [plan.prompt_rows is not None for plan in plans].count(True) == 1
    assert plans[2].rows.context_lens.tolist() == [start]
