"""Ranks with requests of their own: the laws of one scheduler, and where requests go."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.step_plan import ExecutorLimits
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import DraftRule, FakeExecutor, FakeRanks, always_right, always_wrong
from tests.scheduler.driver import Driver, expected_tokens, make_limits, make_request
from tests.scheduler.test_scheduler_laws import ServingMachine


def make_ranks(
    num_ranks: int = 3,
    *,
    limits: ExecutorLimits | None = None,
    policy: DraftLengthPolicy | None = None,
    draft_rule: DraftRule = always_right,
    vocab_size: int = 997,
    **config: Any,
) -> Driver:
    limits = limits or make_limits()
    executors = [FakeExecutor(limits, vocab_size=vocab_size, draft_rule=draft_rule) for _ in range(num_ranks)]
    scheduler = DataParallelScheduler(limits, SchedulerConfig(**config), policy, num_ranks=num_ranks)
    return Driver(scheduler, FakeRanks(executors))


def ranks_of(driver: Driver) -> list[Scheduler]:
    assert isinstance(driver.scheduler, DataParallelScheduler)
    return driver.scheduler.ranks


class DataParallelMachine(ServingMachine):
    """The same with two ranks, few places and pages: a rank is full while the other is empty."""

    def _driver(self, limits: ExecutorLimits, config: SchedulerConfig, draft_rule: DraftRule) -> Driver:
        executors = [FakeExecutor(limits, vocab_size=11, draft_rule=draft_rule) for _ in range(2)]
        return Driver(DataParallelScheduler(limits, config, self.policy, num_ranks=2), FakeRanks(executors))

    @invariant()
    def nobody_is_on_two_ranks(self) -> None:
        if hasattr(self, "driver"):
            one, two = ranks_of(self.driver)
            assert not one.request_ids() & two.request_ids()


TestDataParallelServing = DataParallelMachine.TestCase
TestDataParallelServing.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_requests_are_spread_and_get_their_tokens() -> None:
    driver = make_ranks()
    requests = [make_request(f"r{i}", [i, i + 1, 2], max_new_tokens=6 + i) for i in range(9)]
    for request in requests:
        driver.add(request)
    driver.step()
    assert [rank.num_running for rank in ranks_of(driver)] == [3, 3, 3]
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)


def test_all_ranks_have_one_k_that_of_the_rank_with_most_requests() -> None:
    driver = make_ranks(2, policy=BatchSizeDraftLength({1: 5, 3: 2}))
    for i in range(5):
        driver.add(make_request(f"r{i}", [i, 1, 2], max_new_tokens=20))
    for _ in range(2):
        driver.step()
    step = driver.scheduler.plan()
    assert [plan.rows.num_requests for plan in (step.plan, *step.plan.others)] == [3, 2]
    assert [plan.rows.num_draft_tokens for plan in (step.plan, *step.plan.others)] == [2, 2]


def test_a_request_goes_where_its_prefix_is_unless_that_rank_has_too_many() -> None:
    driver = make_ranks(2, limits=make_limits(max_batch_size=8, num_pages=60, max_num_tokens=60))
    prompt = list(range(24))
    driver.add(make_request("first", prompt, max_new_tokens=2))
    driver.run()
    one, two = ranks_of(driver)
    for i in range(4):  # 20 tokens are cached on rank 0, so up to two requests of 8 tokens more are worth it
        driver.add(make_request(f"r{i}", prompt, max_new_tokens=8))
    assert (one.num_waiting, two.num_waiting) == (3, 1)
    driver.run()


def test_samples_of_a_prompt_stay_together() -> None:
    driver = make_ranks(2, limits=make_limits(max_batch_size=8, num_pages=60, max_num_tokens=60))
    first = make_request("first", range(24), max_new_tokens=4)
    driver.add(first)
    driver.add(replace(first, request_id="second", shares_prompt_of="first"))
    assert [rank.num_waiting for rank in ranks_of(driver)] == [2, 0]


def test_what_waits_for_a_full_rank_runs_on_another() -> None:
    """Two long requests are alone on rank 0 when the short ones of rank 1 have ended."""
    driver = make_ranks(2, limits=make_limits(max_batch_size=1))
    driver.add(make_request("long", [1], max_new_tokens=60))
    driver.add(make_request("short", [2], max_new_tokens=1))
    waiting = make_request("waiting", [3], max_new_tokens=60)
    driver.add(waiting)
    one, two = ranks_of(driver)
    assert (one.num_waiting, two.num_waiting) == (2, 1) or (one.num_waiting, two.num_waiting) == (1, 2)
    for _ in range(3):
        driver.step()
    assert (one.num_running, two.num_running, driver.scheduler.num_waiting) == (1, 1, 0)
    driver.run()
    assert driver.tokens["waiting"] == expected_tokens(driver.executor, waiting)


def test_what_waits_moves_to_the_rank_where_it_costs_least() -> None:
    """Ranks 1 and 2 have room; rank 2 has its prompt in its cache."""
    driver = make_ranks(3, limits=make_limits(max_batch_size=1, num_pages=60, max_num_tokens=60))
    prompt = list(range(24))
    for name, tokens in (("a", [1]), ("b", [2]), ("c", prompt)):
        driver.add(make_request(name, tokens, max_new_tokens=2))
    driver.run()
    ranks = ranks_of(driver)
    ranks[0].add(make_request("long", [1], max_new_tokens=40))
    ranks[0].add(make_request("waiting", prompt, max_new_tokens=40))
    for _ in range(2):  # a first step for the long one, before which the other need not move
        step = driver.scheduler.plan()
        driver.scheduler.commit(step, driver.executor.submit(step.plan).result())
    assert [sorted(rank.request_ids()) for rank in ranks] == [["long"], [], ["waiting"]]


def test_what_waits_overtakes_nobody_on_another_rank() -> None:
    """Rank 1 has pages for the small request of rank 0, but a large one waits for them."""
    driver = make_ranks(2, limits=make_limits(num_pages=16), draft_rule=always_wrong, enable_prefix_caching=False)
    ranks = ranks_of(driver)
    for rank, name, num_tokens in ((0, "long", 50), (1, "short", 30)):
        ranks[rank].add(make_request(name, range(num_tokens), max_new_tokens=14))
    for _ in range(4):
        step = driver.scheduler.plan()
        driver.scheduler.commit(step, driver.executor.submit(step.plan).result())
    small = make_request("small", range(12), max_new_tokens=4)
    for rank, request in ((1, make_request("large", range(40), max_new_tokens=4)), (0, small)):
        ranks[rank].add(request)
    driver.scheduler.plan()
    assert [rank.request_ids() for rank in ranks] == [{"long", "small"}, {"short", "large"}]
    driver.scheduler.abandon()
    ranks[1].end("large", "cancelled")
    driver.scheduler.plan()
    assert ranks[1].request_ids() == {"short", "small"}


def test_a_preempted_request_comes_before_those_that_arrived_after_it() -> None:
    driver = make_ranks(2, limits=make_limits(max_batch_size=1))
    for name in ("a", "b", "c", "d"):
        driver.add(make_request(name, [1], max_new_tokens=20))
    driver.step()
    assert driver.scheduler.preempt("a")
    waiting = ranks_of(driver)[0].next_waiting()
    assert waiting is not None and waiting.request_id == "a"


def test_of_two_planned_steps_the_last_is_abandoned() -> None:
    driver = make_ranks(2)
    requests = [make_request(f"r{i}", [i, 1, 2]) for i in range(3)]
    for request in requests:
        driver.add(request)
    first = driver.scheduler.plan()
    driver.scheduler.plan()
    driver.scheduler.abandon()
    events = driver.scheduler.commit(first, driver.executor.submit(first.plan).result())
    tokens = {event.request_id: [*event.token_ids] for event in events}
    driver.run()
    for request in requests:
        rest = driver.tokens[request.request_id]
        assert [*tokens[request.request_id], *rest] == expected_tokens(driver.executor, request)


def test_pages_decide_too_where_a_request_may_run() -> None:
    """It does not fit beside a long context, though there is a place."""
    limits = make_limits(num_pages=16, page_size=4)
    driver = make_ranks(2, limits=limits, draft_rule=always_wrong, enable_prefix_caching=False)
    driver.add(make_request("long", range(50), max_new_tokens=14))
    for _ in range(4):
        driver.step()
    one, two = ranks_of(driver)
    assert one.num_running == 1
    for i in range(2):
        driver.add(make_request(f"r{i}", range(20), max_new_tokens=10))
    for _ in range(2):
        driver.step()
    assert (one.num_running, two.num_running, driver.scheduler.num_waiting) == (1, 2, 0)


def test_the_queue_is_bounded_over_all_ranks() -> None:
    driver = make_ranks(2, max_queue_len=3)
    for i in range(3):
        driver.add(make_request(f"r{i}"))
    with pytest.raises(QueueFullError, match="fewer than 3 waiting requests, found 3"):
        driver.add(make_request("one too many"))
    with pytest.raises(RequestError, match="in use"):
        driver.add(make_request("r2"))


def test_limits_and_counts_are_those_of_all_ranks() -> None:
    driver = make_ranks(3)
    assert (driver.scheduler.limits.max_batch_size, driver.scheduler.limits.num_pages) == (12, 60)
    for i in range(5):
        driver.add(make_request(f"r{i}", [i, 7], max_new_tokens=7))
    driver.run()
    counts, parts = driver.scheduler.statistics(), [rank.statistics() for rank in ranks_of(driver)]
    assert (counts.num_arrivals, counts.num_finished) == (5, {"length": 5})
    assert counts.num_pages == 60
    assert counts.num_computed_tokens == sum(part.num_computed_tokens for part in parts)
    assert counts.num_steps == max(part.num_steps for part in parts) < sum(part.num_steps for part in parts)
    assert sum(counts.num_steps_by_draft_length.values()) == counts.num_steps


def test_an_adaptive_policy_learns_from_the_rank_with_most_requests() -> None:
    seen: list[StepObservation] = []

    class Watched(AdaptiveDraftLength):
        def observe(self, step: StepObservation) -> None:
            seen.append(step)
            super().observe(step)

    driver = make_ranks(2, policy=Watched(5))
    for i in range(5):  # in turn to rank 0, whose requests are short, and to rank 1
        driver.add(make_request(f"r{i}", [i, 1, 2], max_new_tokens=40 if i % 2 else 6))
    driver.run()
    assert max(step.num_decoding for step in seen) == 3
    assert set(seen[-1].slots.tolist()) <= {4, 5, 6, 7}, "slots of rank 1 come after the 4 of rank 0"


def test_a_lost_device_fails_what_runs_on_any_rank_and_keeps_what_waits() -> None:
    driver = make_ranks(2, limits=make_limits(max_batch_size=1))
    for i in range(4):
        driver.add(make_request(f"r{i}", [i], max_new_tokens=20))
    driver.step()
    driver.scheduler.plan()
    events = driver.scheduler.lose_device("the device is lost")
    assert {event.request_id: event.finish_reason for event in events} == {"r0": "error", "r1": "error"}
    assert driver.scheduler.request_ids() == {"r2", "r3"}
    driver.scheduler.check_integrity()


def test_a_block_is_told_once_and_forgotten_with_its_last_copy() -> None:
    told: dict[int, tuple[int | None, tuple[int, ...], str]] = {}

    class Mirror:
        def stored(self, block_id: int, parent_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
            assert block_id not in told and (parent_id is None or parent_id in told)
            told[block_id] = (parent_id, token_ids, salt)

        def removed(self, block_id: int) -> None:
            del told[block_id]

    driver = make_ranks(2)
    driver.scheduler.watch_prefixes(Mirror())
    for i in range(4):  # the same prompt on both ranks, at once
        driver.add(make_request(f"r{i}", range(9), max_new_tokens=3))
    driver.run()
    one, two = ranks_of(driver)
    assert one.statistics().num_pages_kept_now and two.statistics().num_pages_kept_now
    starts = [tokens for parent, tokens, _ in told.values() if parent is None]
    assert starts == [(0, 1, 2, 3)]
    one.lose_device("")
    assert starts == [tokens for parent, tokens, _ in told.values() if parent is None]
    two.lose_device("")
    assert not told
