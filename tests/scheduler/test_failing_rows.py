"""Rows that cannot be taken in: their request ends, the others and the scheduler's state are unharmed."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.request_pool import RequestPool
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.sequence import Sequence
from tests.fake_executor import FakeExecutor, always_right, always_wrong, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request

NAMES = ("first", "bad", "last")
MOSTLY_RIGHT = right_with_probability(0.8)


class OverflowingExecutor(FakeExecutor):
    """The logits of "bad" give no token from a position on, as `step_result` reports it; K of no priority_key."""

    from_position = 9

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        return tuple(map(self._overflowed, batch.requests, super().run_rows(batch)))

    def _overflowed(self, row: ScheduledRequest, result: RequestResult) -> RequestResult:
        num_good = max(0, self.from_position - (result.next_context_len - result.num_accepted - 1))
        if row.request_id != "bad" or num_good > result.num_accepted:
            return result
        next_context_len = result.next_context_len - result.num_accepted + num_good
        return RequestResult(
            emitted_tokens=result.emitted_tokens[:num_good],
            logprobs=result.logprobs[:num_good],
            num_accepted=num_good,
            draft_tokens=(),
            next_context_len=next_context_len,
            non_finite_position=next_context_len - 1,
        )


def overflowing_driver(draft_rule: Any = MOSTLY_RIGHT, **limits: int) -> Driver:
    driver = make_driver(make_limits(**limits))
    driver.executor = OverflowingExecutor(driver.scheduler.limits, draft_rule=draft_rule)
    return driver


def error_of(driver: Driver, name: str = "bad") -> str:
    (event,) = (event for event in driver.events if event.request_id == name and event.finish_reason is not None)
    return str(event.error)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("draft_rule", [always_wrong, MOSTLY_RIGHT])
def test_a_request_ends_with_the_token_before_logits_that_are_not_finite(ahead: bool, draft_rule: Any) -> None:
    driver = overflowing_driver(draft_rule)
    requests = [make_request(name, (7, 8, index)) for index, name in enumerate(NAMES)]
    for request in requests:
        driver.add(request)
    driver.run(ahead=ahead)
    assert driver.finish_reasons == {"first": "length", "bad": "error", "last": "length"}
    assert "expected finite logits, found NaN or infinity: the logits are not finite at position 9" in error_of(driver)
    for request in requests:
        expected = expected_tokens(driver.executor, request)
        # position 9 has the 7th token, the last that logits before it gave: drafts or not
        assert driver.tokens[request.request_id] == (expected[:7] if request.request_id == "bad" else expected)
    assert driver.scheduler.statistics().num_finished == {"length": 2, "error": 1}
    assert driver.scheduler.num_pages_in_use == 0


@pytest.mark.parametrize(
    ("ending", "reason"), [({"max_new_tokens": 7}, "length"), ({"max_new_tokens": 8}, "error"), ({}, "stop")]
)
def test_logits_behind_the_end_of_a_request_do_not_matter(ending: dict[str, int], reason: str) -> None:
    driver = overflowing_driver()
    request = make_request("bad", (7, 8, 1), **ending)
    if reason == "stop":
        request = replace(request, stop_token_ids=frozenset(expected_tokens(driver.executor, request)[5:7]))
    driver.add(request)
    driver.run()
    assert driver.finish_reasons == {"bad": reason}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("draft_rule", [always_wrong, MOSTLY_RIGHT, always_right])
def test_a_request_of_any_length_ends_by_it_or_by_the_logits_whichever_comes_first(
    draft_rule: Any, ahead: bool
) -> None:
    """A step that is planned ahead may verify more than the request has left."""
    for max_new_tokens in range(1, 14):
        driver = overflowing_driver(draft_rule)
        request = make_request("bad", (7, 8, 1), max_new_tokens=max_new_tokens)
        driver.add(request)
        driver.run(ahead=ahead)
        assert driver.finish_reasons == {"bad": "length" if max_new_tokens <= 7 else "error"}
        assert driver.tokens["bad"] == expected_tokens(driver.executor, request)[:7]


@pytest.mark.parametrize("draft_rule", [always_wrong, MOSTLY_RIGHT, always_right])
def test_logits_that_are_not_finite_end_a_request_that_was_sent_back_meanwhile(draft_rule: Any) -> None:
    for num_steps in range(8):
        driver = overflowing_driver(draft_rule)
        request = make_request("bad", (7, 8, 1), max_new_tokens=20)
        driver.add(request)
        for _ in range(num_steps):
            driver.step()
        driver.leave_in_flight(lambda ids, driver=driver: driver.scheduler.preempt("bad"))
        assert not driver.scheduler.has_work or num_steps < 7, "it is not computed again"
        driver.run()
        assert driver.finish_reasons == {"bad": "error"}
        assert driver.tokens["bad"] == expected_tokens(driver.executor, request)[:7]


def test_a_block_without_a_bonus_is_in_no_count_of_acceptance() -> None:
    driver = overflowing_driver()
    driver.add(make_request("bad"))
    driver.run()
    verified = [event for event in driver.events if event.num_candidates]
    statistics = driver.scheduler.statistics()
    assert statistics.num_verify_blocks == len(verified) < statistics.num_steps - 1  # nor the prefill
    assert statistics.num_accepted_tokens == sum(event.num_accepted for event in verified)


def test_pages_behind_logits_that_are_not_finite_are_kept_for_nobody() -> None:
    driver = overflowing_driver(max_num_tokens=8)
    driver.executor.from_position = 12  # type: ignore[attr-defined]
    driver.add(make_request("bad", range(20)))
    driver.run()
    assert driver.finish_reasons == {"bad": "error"}
    assert driver.scheduler.statistics().num_pages_kept_now == 2  # of the first chunk of 8; pages of 4


@pytest.fixture
def silent() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
def test_a_page_that_cannot_be_cached_costs_no_request_a_token(
    is_after: bool, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(draft_rule=right_with_probability(0.7))
    requests = [make_request(name, (7, 8, index)) for index, name in enumerate(NAMES)]
    for request in requests:
        driver.add(request)
    driver.step()
    keep = RequestPool._cache_full_pages

    def failing(pool: RequestPool, sequence: Sequence) -> None:
        if is_after or sequence.request_id != "bad":
            keep(pool, sequence)
        if sequence.request_id == "bad":
            raise ValueError("not today")

    monkeypatch.setattr(RequestPool, "_cache_full_pages", failing)
    driver.run(ahead=ahead)
    assert driver.finish_reasons == dict.fromkeys(NAMES, "length")
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    assert driver.scheduler.num_pages_in_use == 0


@pytest.mark.usefixtures("silent")
def test_a_row_that_breaks_the_contract_does_not_end_a_new_request_of_its_name() -> None:
    driver = make_driver()
    driver.add(make_request("bad"))
    step = driver.scheduler.plan()
    result = driver.executor.submit(step.plan).result()
    result.num_accepted[0] = 9
    driver.cancel("bad")
    driver.finish_reasons.clear()
    driver.add(make_request("bad"))
    assert driver.scheduler.commit(step, result) == []
    driver.run()
    assert driver.finish_reasons == {"bad": "length"}


@pytest.mark.parametrize("num_abandoned", [1, 2])
@pytest.mark.parametrize("is_committed_first", [False, True])
def test_a_request_sent_back_waits_for_no_repeated_step_that_did_not_run(
    is_committed_first: bool, num_abandoned: int
) -> None:
    driver = make_driver(make_limits(max_seq_len=200, num_pages=100))
    request = make_request("r", max_new_tokens=100)
    driver.add(request)
    for _ in range(4):
        driver.step()
    running = driver.scheduler.plan()
    for number in range(num_abandoned):
        assert driver.scheduler.plan().planned is running.planned, "it repeats"
        if number < num_abandoned - 1 or not is_committed_first:
            driver.scheduler.abandon()
    driver._take(driver.scheduler.commit(running, driver.executor.submit(running.plan).result()))
    if is_committed_first:
        driver.scheduler.abandon()
    driver.scheduler.preempt("r")
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_a_request_sent_back_waits_for_the_step_that_runs_if_the_next_one_does_not() -> None:
    driver = make_driver()
    request = make_request("r", max_new_tokens=30)
    driver.add(request)
    driver.step()
    running = driver.scheduler.plan()
    assert len(driver.scheduler.plan().sequences) == 1
    driver.scheduler.preempt("r")
    driver.scheduler.abandon()
    behind = driver.scheduler.plan()
    assert behind.sequences == []
    (event,) = driver.scheduler.commit(running, driver.executor.submit(running.plan).result())
    assert event.token_ids, "they are as good as if it had stayed"
    driver._take([event])
    driver.scheduler.commit(behind, None)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_a_policy_that_cannot_learn_costs_no_request_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(DraftLengthPolicy):
        def choose(self, num_decoding: int) -> int:
            return 2

        def observe(self, step: StepObservation) -> None:
            raise ZeroDivisionError

    driver = make_driver()
    driver.scheduler = Scheduler(driver.executor.limits, policy=Forgetful())
    request = make_request("r")
    driver.add(request)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)
    assert "the draft length policy could not observe a step" in caplog.text
