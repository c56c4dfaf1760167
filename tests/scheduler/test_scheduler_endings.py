"""How a request is refused, and how it ends."""

from collections.abc import Callable, Sequence

import pytest

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.request import TokenEvent
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import always_wrong
from tests.scheduler.driver import expected_tokens, make_driver, make_limits, make_request


@pytest.mark.parametrize(
    ("prompt", "num_pages", "message"),
    [
        ((), 20, "expected at least 1 token, found 0"),
        (range(64), 20, r"at most 63 tokens \(max_seq_len - 1\), found 64"),
        (range(12), 3, r"at most 11 tokens \(3 pages of 4\), found 12"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: Sequence[int], num_pages: int, message: str) -> None:
    driver = make_driver(make_limits(num_pages=num_pages))
    with pytest.raises(RequestError, match=message):
        driver.add(make_request("r", prompt))
    assert not driver.scheduler.has_work


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(63, 20), (11, 3)])
def test_the_longest_prompt_leaves_room_for_one_token(num_tokens: int, num_pages: int) -> None:
    driver = make_driver(make_limits(num_pages=num_pages))
    driver.add(make_request("r", range(num_tokens)))
    driver.run()
    assert (len(driver.tokens["r"]), driver.finish_reasons["r"]) == (1, "length")


def test_two_requests_cannot_have_the_same_id_at_the_same_time() -> None:
    driver = make_driver()
    driver.add(make_request("r"))
    with pytest.raises(RequestError, match="'r', in use"):
        driver.add(make_request("r"))
    driver.run()
    driver.finish_reasons.clear()
    driver.add(make_request("r"))


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    driver = make_driver(make_limits(max_batch_size=1), max_queue_len=2)
    for name in ("a", "b"):
        driver.add(make_request(name))
    with pytest.raises(QueueFullError, match="fewer than 2 waiting requests, found 2"):
        driver.add(make_request("c"))
    driver.step()
    driver.add(make_request("c"))
    driver.run()
    assert set(driver.finish_reasons) == {"a", "b", "c"}


def test_a_preempted_request_comes_back_even_when_the_queue_is_full() -> None:
    driver = make_driver(make_limits(max_batch_size=1), max_queue_len=1)
    driver.add(make_request("a"))
    driver.step()
    driver.add(make_request("b"))
    assert [driver.scheduler.preempt(name) for name in ("b", "unknown", "a", "a")] == [False, False, True, False]
    driver.run()
    assert list(driver.finish_reasons) == ["a", "b"]
    assert driver.scheduler.statistics().num_preemptions == 1


def test_waiting_too_long_ends_a_request_with_timeout() -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    driver.add(make_request("runs"))
    driver.add(make_request("waits", queue_timeout_s=2.0))
    driver.step()
    driver.now = 1.9
    driver.step()
    assert "waits" not in driver.finish_reasons
    driver.now = 2.0
    driver.step()
    assert driver.finish_reasons == {"waits": "timeout"}
    (event,) = (event for event in driver.events if event.request_id == "waits")
    assert event.token_ids == ()
    assert event.error is not None and "expected a first step within 2.0 s, found 2.000 s" in event.error
    assert event.statistics is not None and event.statistics.queue_time_s == 2.0


@pytest.mark.parametrize("leaves", ["first", "second", "third"])
def test_those_who_wait_time_out_whoever_of_them_leaves_before(leaves: str) -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    driver.add(make_request("runs"))
    for name in ("first", "second", "third"):
        driver.add(make_request(name, queue_timeout_s=2.0))
    driver.step()
    driver.cancel(leaves)
    driver.now = 2.0
    driver.step()
    reasons = dict.fromkeys(("first", "second", "third"), "timeout") | {leaves: "cancelled"}
    assert driver.finish_reasons == reasons


def test_a_request_that_has_started_is_not_timed_out_by_being_preempted() -> None:
    driver = make_driver(draft_rule=always_wrong)
    driver.add(make_request("r", queue_timeout_s=1.0))
    driver.step()
    driver.scheduler.preempt("r")
    driver.now = 5.0
    driver.run()
    assert driver.finish_reasons == {"r": "length"}


def test_a_cancelled_request_is_gone_at_once_whether_it_waits_or_runs() -> None:
    driver = make_driver(make_limits(max_batch_size=1))
    for name in ("runs", "waits"):
        driver.add(make_request(name))
    driver.step()
    for name in ("runs", "waits", "unknown"):
        driver.cancel(name)
    assert driver.finish_reasons == {"runs": "cancelled", "waits": "cancelled"}
    assert not driver.scheduler.has_work
    assert driver.scheduler.num_pages_in_use == 0


@pytest.mark.parametrize(
    ("end", "reason", "error"),
    [
        (lambda scheduler: scheduler.end("r", "cancelled"), "cancelled", None),
        (lambda scheduler: scheduler.end("r", "stop"), "stop", None),
        (lambda scheduler: scheduler.end("r", "error", "no constraint"), "error", "no constraint"),
    ],
)
def test_a_request_ends_for_the_reason_that_is_given_and_once(
    end: Callable[[Scheduler], TokenEvent | None], reason: str, error: str | None
) -> None:
    driver = make_driver()
    driver.add(make_request("r", range(12)))
    driver.add(make_request("other"))
    driver.now = 3.0
    driver.step()
    assert driver.scheduler.request_ids() == {"r", "other"}
    event = end(driver.scheduler)
    assert event is not None and (event.request_id, event.token_ids) == ("r", ())
    assert (event.finish_reason, event.error) == (reason, error)
    assert event.statistics is not None and event.statistics.queue_time_s == 3.0
    assert driver.scheduler.request_ids() == {"other"} and end(driver.scheduler) is None
    assert driver.scheduler.statistics().num_finished == {reason: 1}
    driver.run()


def test_what_a_step_gave_a_request_cancelled_meanwhile_is_dropped() -> None:
    driver = make_driver()
    driver.add(make_request("r"))
    step = driver.scheduler.plan()
    driver.cancel("r")
    assert driver.scheduler.commit(step, driver.executor.submit(step.plan).result()) == []
    driver.scheduler.check_integrity()


def test_a_new_request_may_take_the_id_of_one_cancelled_in_flight() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1, 2, 3)))
    step = driver.scheduler.plan()
    driver.cancel("r")
    driver.finish_reasons.clear()
    request = make_request("r", (4, 5))
    driver.add(request)
    assert driver.scheduler.commit(step, driver.executor.submit(step.plan).result()) == []
    driver.tokens.clear()
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


@pytest.mark.parametrize("is_repeated", [False, True], ids=["prompt", "step that repeats"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_accepted": 1},
        {"num_accepted": -1},
        {"next_context_lens": 1},
        {"next_context_lens": -1},
        {"num_accepted": 1, "next_context_lens": 1},
        {"num_accepted": -6, "next_context_lens": -6},
    ],
)
def test_a_result_that_breaks_the_contract_fails_its_request_only(changes: dict[str, int], is_repeated: bool) -> None:
    driver = make_driver(make_limits(max_seq_len=200, num_pages=100))
    driver.add(make_request("bad", range(8), max_new_tokens=100))
    driver.add(make_request("good", max_new_tokens=100))
    for _ in range(4 if is_repeated else 0):
        driver.step()
    kept = driver.scheduler.statistics().num_pages_kept_now
    step = driver.scheduler.plan()
    assert (step.planned.steady is not None) == is_repeated
    result = driver.executor.submit(step.plan).result()
    for field, change in changes.items():
        getattr(result, field)[0] += change
    bad, good = driver.scheduler.commit(step, result)
    driver.scheduler.check_integrity()
    assert bad.finish_reason == "error" and "expected a result that follows the step contract" in str(bad.error)
    assert bad.token_ids == () and good.finish_reason is None and good.token_ids
    num_of_good = len(driver.tokens.get("good", ())) + len(good.token_ids) + 2  # its last token has no K/V yet
    assert driver.scheduler.statistics().num_pages_kept_now <= kept + num_of_good // 4, "nobody shares its pages"


def test_a_paused_request_gives_its_place_away_and_goes_on_with_the_same_tokens() -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    request = make_request("paused")
    driver.add(request)
    driver.step()
    assert driver.scheduler.pause("paused")
    driver.scheduler.check_integrity()
    assert driver.scheduler.num_pages_in_use == 0
    assert not driver.scheduler.has_work
    driver.add(make_request("other"))
    driver.run()
    assert driver.finish_reasons == {"other": "length"}
    assert driver.scheduler.resume("paused")
    driver.run()
    assert driver.tokens["paused"] == expected_tokens(driver.executor, request)


def test_a_request_paused_too_long_ends_with_timeout() -> None:
    driver = make_driver(max_paused_s=10.0)
    driver.add(make_request("r"))
    driver.now = 5.0
    driver.step()
    driver.scheduler.pause("r")
    driver.now = 14.0
    driver.step()
    assert driver.finish_reasons == {}
    driver.now = 15.0
    driver.step()
    assert driver.finish_reasons == {"r": "timeout"}
    assert "found 10.000 s without one" in str(driver.events[-1].error)


def test_a_stale_step_counts_only_drafts_that_could_still_be_emitted() -> None:
    """Two steps run when the request is preempted: the second one verifies more than the first leaves to emit."""
    driver = make_driver()
    request = make_request("r", max_new_tokens=10)
    driver.add(request)
    driver.step_ahead()  # the prompt's token, and a step of 6 tokens runs
    driver.leave_in_flight(lambda ids: [driver.scheduler.preempt(name) for name in ids])
    driver.run(ahead=True)
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)
    assert [(event.num_candidates, event.num_accepted) for event in driver.events] == [(0, 0), (5, 5), (2, 2)]
