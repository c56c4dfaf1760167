"""Places, pages and drafts: what a step gives to whom, at the boundaries."""

from collections.abc import Sequence

import pytest

from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import FakeExecutor, always_wrong
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request


class Script(DraftLengthPolicy):
    """A draft length policy that gives these K in turn, then the last one for ever; keeps what it is told."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self.batch_sizes: list[int] = []
        self.steps: list[StepObservation] = []

    def choose(self, num_decoding: int) -> int:
        self.batch_sizes.append(num_decoding)
        return self._lengths.pop(0) if len(self._lengths) > 1 else self._lengths[0]

    def observe(self, step: StepObservation) -> None:
        self.steps.append(step)


def lengths_of(driver: Driver) -> list[int]:
    return [batch.num_draft_tokens for batch in driver.executor.batches]


def rows_of(driver: Driver) -> list[tuple[str, int, int]]:
    """Of the last step: request, tokens, candidates."""
    rows = driver.executor.batches[-1].requests
    return [(row.request_id, len(row.token_ids), row.num_candidates) for row in rows]


# Admission


@pytest.mark.parametrize(("num_pages", "is_admitted"), [(4, False), (5, True)])
def test_admission_leaves_a_page_to_each_running_request(num_pages: int, is_admitted: bool) -> None:
    driver = make_driver(make_limits(num_pages=num_pages), draft_rule=always_wrong, enable_prefix_caching=False)
    driver.add(make_request("runs", range(4), max_new_tokens=5))  # 1 page, and one more with its next token
    driver.step()
    driver.add(make_request("waits", range(12), max_new_tokens=1))  # 3 pages
    driver.step()
    assert [name for name, _, _ in rows_of(driver)] == (["runs", "waits"] if is_admitted else ["runs"])
    driver.run()
    assert driver.scheduler.statistics().num_preemptions == 0, "who is let in too early is sent back"
    assert set(driver.finish_reasons.values()) == {"length"}


@pytest.mark.parametrize(("num_tokens", "num_admitted"), [(7, 2), (8, 1), (9, 1)])
def test_requests_whose_prompts_the_step_has_no_tokens_for_keep_waiting(num_tokens: int, num_admitted: int) -> None:
    """Otherwise they would hold pages, and their prefix would be looked up before its owner computed it."""
    driver = make_driver(make_limits(max_num_tokens=8))
    for name in "abc":
        driver.add(make_request(name, range(num_tokens)))
    driver.scheduler.plan()
    assert driver.scheduler.num_running == num_admitted


def test_prompts_that_are_under_way_keep_newcomers_waiting() -> None:
    driver = make_driver(make_limits(max_num_tokens=8))
    driver.add(make_request("long", range(24)))
    driver.step()
    driver.add(make_request("next", range(4)))
    driver.step()
    assert driver.scheduler.num_waiting == 1
    assert rows_of(driver) == [("long", 8, 0)]
    driver.step()
    assert rows_of(driver) == [("long", 8, 0)]
    driver.step()
    assert rows_of(driver) == [("long", 6, 5), ("next", 2, 0)]


# Drafts


def test_drafts_fill_the_pages_that_are_there_in_order_of_priority() -> None:
    """Of four pages the first request takes two more, and the second one has room for a draft in its own."""
    driver = make_driver(make_limits(num_pages=4), draft_rule=always_wrong, enable_prefix_caching=False)
    driver.add(make_request("first", range(3), max_new_tokens=9))
    driver.add(make_request("second", range(2), max_new_tokens=9))
    driver.step()
    driver.step()
    assert rows_of(driver) == [("first", 6, 5), ("second", 2, 1)]


@pytest.mark.parametrize(("max_new_tokens", "lengths"), [(1, [0]), (2, [0, 0]), (3, [5, 5, 0]), (4, [5, 5, 5, 0])])
def test_drafts_are_made_only_when_one_and_a_bonus_token_can_follow(max_new_tokens: int, lengths: list[int]) -> None:
    driver = make_driver(draft_rule=always_wrong)
    driver.add(make_request("r", max_new_tokens=max_new_tokens))
    driver.run()
    assert lengths_of(driver) == lengths


def test_a_row_in_flight_of_the_request_before_counts_for_nobody() -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    driver.add(make_request("before"))
    driver.step()
    driver.leave_in_flight(lambda ids: driver.cancel("before"))
    driver.executor.batches.clear()
    driver.add(make_request("r", max_new_tokens=3))
    driver.run()
    assert lengths_of(driver) == [5, 5, 0]


@pytest.mark.parametrize(("max_new_tokens", "lengths"), [(2, [0, 0]), (3, [0, 0, 0]), (4, [0, 5, 5, 0])])
def test_behind_a_running_step_two_tokens_are_as_good_as_emitted(max_new_tokens: int, lengths: list[int]) -> None:
    limits = make_limits()
    policy = Script([0, 5])  # nothing to verify in the second step, which is planned while the first runs
    driver = Driver(Scheduler(limits, policy=policy), FakeExecutor(limits, draft_rule=always_wrong))
    driver.add(make_request("r", max_new_tokens=max_new_tokens))
    driver.run(ahead=True)
    assert lengths_of(driver) == lengths


def test_the_policy_is_asked_for_those_that_decode_and_told_of_what_ran() -> None:
    limits = make_limits()
    policy = Script([2])
    driver = Driver(Scheduler(limits, policy=policy), FakeExecutor(limits, draft_rule=always_wrong))
    driver.add(make_request("a", range(3), max_new_tokens=20))
    driver.step()
    driver.add(make_request("b", range(30), max_new_tokens=20))
    driver.step()
    step = driver.scheduler.plan()
    driver.scheduler.commit(step, driver.executor.submit(step.plan).result(), elapsed_s=0.25)
    assert policy.batch_sizes == [1, 1, 1], "the first step drafts for the request whose prompt it computes"
    first, second, third = policy.steps
    blocks = [(list(step.num_candidates), list(step.num_accepted)) for step in policy.steps]
    assert (first.num_decoding, first.num_prefill_tokens, blocks[0]) == (0, 3, ([], []))
    assert (second.num_decoding, second.num_prefill_tokens, blocks[1]) == (1, 21, ([2], [0]))
    assert (third.num_decoding, third.num_prefill_tokens, blocks[2]) == (1, 9, ([2], [0]))
    assert list(second.slots) == list(third.slots) and list(second.epochs) == list(third.epochs)
    assert [step.elapsed_s for step in policy.steps] == [None, None, 0.25]
    assert {step.num_draft_tokens for step in policy.steps} == {2}


# Paused requests


def test_a_paused_request_times_out_by_the_time_it_was_paused() -> None:
    driver = make_driver(max_paused_s=10.0, draft_rule=always_wrong)
    driver.now = 3.0
    driver.add(make_request("r", max_new_tokens=30))
    driver.step()
    driver.now = 50.0
    driver.step()
    driver.scheduler.pause("r")
    driver.now = 59.9
    driver.step()
    assert driver.finish_reasons == {}
    driver.now = 60.0
    driver.step()
    assert driver.finish_reasons == {"r": "timeout"}
    assert "found 10.000 s without one" in str(driver.events[-1].error)


def test_a_request_that_was_resumed_starts_its_next_pause_anew() -> None:
    driver = make_driver(max_paused_s=10.0, draft_rule=always_wrong)
    driver.add(make_request("r", max_new_tokens=30))
    for paused_s in (1.0, 8.0, 15.0):
        driver.now = paused_s
        driver.step()
        assert driver.scheduler.pause("r")
        assert not driver.scheduler.pause("r"), "it is paused already"
        driver.now += 6.0
        driver.step()
        assert driver.scheduler.resume("r")
        assert not driver.scheduler.resume("r"), "it is not paused"
    driver.run()
    assert driver.finish_reasons == {"r": "length"}


def test_a_queue_timeout_does_not_end_a_request_whose_turn_it_is_again() -> None:
    limits = make_limits(max_batch_size=1)
    driver = Driver(Scheduler(limits, SchedulerConfig()), FakeExecutor(limits, draft_rule=always_wrong))
    driver.now = 7.0
    driver.add(make_request("r", queue_timeout_s=2.0))
    driver.now = 8.9
    driver.step()
    driver.scheduler.pause("r")
    driver.now = 20.0
    assert driver.scheduler.resume("r")
    driver.run()
    assert driver.finish_reasons == {"r": "length"}
    assert driver.events[-1].statistics is not None
    assert driver.events[-1].statistics.queue_time_s == pytest.approx(1.9)


def test_a_row_that_misses_the_next_step_for_want_of_pages_has_landed_when_its_own_is_committed() -> None:
    """Otherwise it would wait for ever for a step that was committed long ago."""
    limits = make_limits(num_pages=10, page_size=4, max_num_tokens=13, max_draft_len=1)
    driver = make_driver(limits, draft_rule=always_wrong, enable_prefix_caching=False)
    requests = [make_request("first", [0], max_new_tokens=1), make_request("second", [0], max_new_tokens=9)]
    requests += [
        make_request("short of pages", [0] * 10, max_new_tokens=7),
        make_request("urgent", [0] * 12, max_new_tokens=10, priority=1),
    ]
    for request in requests:
        driver.add(request)
    driver.run(ahead=True)  # the driver checks the invariants in each step
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
