"""Rows that cannot be taken in: their request ends, the others and the scheduler's state are unharmed."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepResult
from dflash_trt.executor.fake import FakeExecutor, always_wrong, right_with_probability
from dflash_trt.scheduler.draft_length import StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.sequence import Sequence
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request

NAMES = ("first", "bad", "last")
MOSTLY_RIGHT = right_with_probability(0.8)


class OverflowingExecutor(FakeExecutor):
    """The logits of "bad" give no token from a position on, as `step_result` reports it; K of no priority_key."""

    from_position = 9

    def step(self, batch: StepBatch) -> StepResult:
        results = super().step(batch).requests
        return StepResult(requests=tuple(map(self._overflowed, batch.requests, results)))

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


def raising_before(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *arguments: Any) -> Any:
        if any(getattr(argument, "request_id", None) == "bad" for argument in (self, *arguments)):
            raise ValueError("not today")
        return method(self, *arguments)

    return wrapper


def raising_after(method: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *arguments: Any) -> Any:
        result = method(self, *arguments)
        if any(getattr(argument, "request_id", None) == "bad" for argument in (self, *arguments)):
            raise ValueError("not today")
        return result

    return wrapper


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fault", [raising_before, raising_after])
@pytest.mark.parametrize("place", ["append", "advance", "keep_full_pages"])
def test_a_commit_that_raises_for_one_request_ends_that_request_alone(
    place: str, fault: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(draft_rule=right_with_probability(0.7))
    requests = [make_request(name, (7, 8, index)) for index, name in enumerate(NAMES)]
    for request in requests:
        driver.add(request)
    driver.step()
    owner = Sequence if place != "keep_full_pages" else type(driver.scheduler._request_pool)
    monkeypatch.setattr(owner, place, fault(getattr(owner, place)))
    driver.run(ahead=ahead)
    assert driver.finish_reasons == {"first": "length", "bad": "error", "last": "length"}
    assert error_of(driver) == "ValueError: not today"
    for request in (requests[0], requests[2]):
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    statistics = driver.scheduler.statistics()
    assert statistics.num_finished == {"length": 2, "error": 1}
    assert driver.scheduler.num_pages_in_use == 0
    driver.finish_reasons.clear()
    driver.add(make_request("good", (7, 8, 9)))  # the name may be used again, too
    driver.run(ahead=ahead)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("value", [None, "1", 1.5])
def test_a_result_of_wrong_types_ends_its_request_alone(value: Any) -> None:
    driver = make_driver()
    for name in NAMES:
        driver.add(make_request(name))
    batch = driver.scheduler.schedule()
    results = list(driver.executor.step(batch).requests)
    results[1] = replace(results[1], num_accepted=value)
    events = driver.scheduler.commit(batch, StepResult(requests=tuple(results)))
    driver.scheduler.check_integrity()
    assert [event.finish_reason for event in events] == [None, "error", None]


@pytest.mark.usefixtures("silent")
def test_a_row_that_raises_does_not_end_a_new_request_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    driver.add(make_request("bad"))
    batch = driver.scheduler.schedule()
    result = replace(driver.executor.step(batch).requests[0], num_accepted=9)
    driver.cancel("bad")
    driver.finish_reasons.clear()
    driver.add(make_request("bad"))
    assert driver.scheduler.commit(batch, StepResult(requests=(result,))) == []
    driver.run()
    assert driver.finish_reasons == {"bad": "length"}


def test_a_policy_that_cannot_learn_costs_no_request_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful:
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
