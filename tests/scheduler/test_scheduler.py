"""What the scheduler decides: who runs, with how many tokens and drafts, and how a request ends."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.batch import ExecutorLimits, RequestResult, StepBatch, StepResult
from dflash_trt.core.errors import CapacityError, ConfigError, QueueFullError, RequestError
from dflash_trt.executor.fake import DraftRule, FakeExecutor, always_right, always_wrong, right_with_probability
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from tests.scheduler.driver import Driver, expected_tokens, make_limits, make_request


def make_driver(
    limits: ExecutorLimits | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_rule: DraftRule = always_right,
    vocab_size: int = 997,
    **config: Any,
) -> Driver:
    limits = limits or make_limits()
    policy = None if num_draft_tokens is None else FixedDraftLength(num_draft_tokens)
    return Driver(
        Scheduler(limits, SchedulerConfig(**config), policy),
        FakeExecutor(limits, vocab_size=vocab_size, draft_rule=draft_rule),
    )


def shape(batch: StepBatch) -> list[tuple[str, int, int]]:
    """Per row: request, tokens, candidates."""
    return [(row.request_id, len(row.token_ids), row.num_candidates) for row in batch.requests]


def shapes(driver: Driver) -> list[list[tuple[str, int, int]]]:
    return [shape(batch) for batch in driver.executor.batches]


# Tokens


@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("num_draft_tokens", range(6))
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_every_k_gives_the_tokens_of_decoding_alone(num_draft_tokens: int, right: float, is_ahead: bool) -> None:
    driver = make_driver(num_draft_tokens=num_draft_tokens, draft_rule=right_with_probability(right))
    requests = [
        make_request(f"r{i}", range(1, 2 + 3 * i), max_new_tokens=1 + 4 * i, temperature=i % 2, seed=i)
        for i in range(9)
    ]
    for request in requests:
        driver.add(request)
    driver.run(ahead=is_ahead)
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
        assert driver.finish_reasons[request.request_id] == "length"


def test_a_request_is_drafted_for_right_after_its_prefill() -> None:
    driver = make_driver()
    driver.add(make_request("r", max_new_tokens=7))
    driver.run()
    assert shapes(driver) == [[("r", 3, 0)], [("r", 6, 5)]]


def test_drafts_that_could_not_be_emitted_are_not_verified() -> None:
    driver = make_driver(draft_rule=always_wrong)
    driver.add(make_request("r", max_new_tokens=4))
    driver.run()
    assert [batch[0][2] for batch in shapes(driver)] == [0, 2, 1, 0]


def test_no_drafts_are_made_that_nobody_can_use() -> None:
    driver = make_driver()
    driver.add(make_request("r", range(30), max_new_tokens=1))
    driver.run()
    assert [batch.num_draft_tokens for batch in driver.executor.batches] == [0, 0]  # a chunk, then the only token


@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain", "overlapped"])
def test_a_stop_token_inside_an_accepted_run_ends_the_request_there(is_ahead: bool) -> None:
    driver = make_driver()
    plain = driver.executor.target.generate((1, 2, 3), 12)
    request = make_request("r", max_new_tokens=50, stop_token_ids=[plain[3]])
    driver.add(request)
    driver.run(ahead=is_ahead)
    assert driver.tokens["r"] == plain[:4]
    assert driver.finish_reasons["r"] == "stop"
    assert driver.events[-1].num_accepted > len(driver.events[-1].token_ids) - 1, "the step itself accepted more"


def test_a_stop_token_that_is_also_the_last_allowed_one_is_a_stop() -> None:
    driver = make_driver()
    plain = driver.executor.target.generate((1, 2, 3), 4)
    driver.add(make_request("r", max_new_tokens=4, stop_token_ids=[plain[3]]))
    driver.run()
    assert (driver.tokens["r"], driver.finish_reasons["r"]) == (plain, "stop")


def test_a_request_ends_with_length_at_max_seq_len() -> None:
    driver = make_driver()
    driver.add(make_request("r", range(60), max_new_tokens=50))
    driver.run()
    assert len(driver.tokens["r"]) == 4
    assert driver.finish_reasons["r"] == "length"


def test_a_request_ends_with_length_when_it_fills_every_page() -> None:
    driver = make_driver(make_limits(num_pages=4))
    driver.add(make_request("r", range(6), max_new_tokens=50))
    driver.run()
    assert len(driver.tokens["r"]) == 16 - 6
    assert driver.finish_reasons["r"] == "length"


def test_logprobs_come_only_when_asked_for_and_one_per_token() -> None:
    driver = make_driver()
    driver.add(make_request("with", logprobs=True))
    driver.add(make_request("without"))
    driver.run()
    for event in driver.events:
        assert len(event.logprobs) == (len(event.token_ids) if event.request_id == "with" else 0)


# Batches


def test_prompt_chunks_ride_with_verify_blocks() -> None:
    driver = make_driver(make_limits(max_num_tokens=10), draft_rule=always_wrong)
    driver.add(make_request("first", range(4), max_new_tokens=30))
    driver.step()
    driver.add(make_request("second", range(16)))
    for _ in range(4):
        driver.step()
    assert shapes(driver)[1:4] == [
        [("first", 6, 5), ("second", 4, 0)],
        [("first", 6, 5), ("second", 4, 0)],
        [("first", 6, 5), ("second", 4, 0)],
    ]


def test_verify_blocks_leave_a_share_of_the_step_to_waiting_prompts() -> None:
    limits = make_limits(max_num_tokens=8, max_batch_size=3)
    driver = make_driver(limits, draft_rule=always_wrong)
    driver.add(make_request("first", range(4), max_new_tokens=40))
    driver.step()
    driver.add(make_request("second", range(40)))
    driver.step()
    driver.step()
    assert shapes(driver)[2] == [("first", 6, 5), ("second", 2, 0)]


def test_max_prefill_tokens_bounds_the_prompt_work_of_a_step() -> None:
    driver = make_driver(max_prefill_tokens=5)
    driver.add(make_request("r", range(12)))
    driver.run()
    assert [batch[0][1] for batch in shapes(driver)[:3]] == [5, 5, 2]


def test_requests_are_admitted_in_the_order_they_came_and_no_more_than_fit() -> None:
    driver = make_driver(make_limits(max_batch_size=2), draft_rule=always_wrong)
    for i in range(4):
        driver.add(make_request(f"r{i}", max_new_tokens=3))
    driver.run()
    ran = [sorted(row[0] for row in batch) for batch in shapes(driver)]
    assert ran[:3] == [["r0", "r1"]] * 3
    assert ran[3:6] == [["r2", "r3"]] * 3


def test_higher_priority_goes_first() -> None:
    driver = make_driver(make_limits(max_batch_size=1))
    for name, priority in (("low", 0), ("high", 5), ("middle", 1)):
        driver.add(make_request(name, priority=priority))
    driver.run()
    assert list(driver.finish_reasons) == ["high", "middle", "low"]


@pytest.mark.parametrize("preempts", [True, False])
def test_a_waiting_request_takes_the_place_of_one_of_lower_priority(preempts: bool) -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong, preempts_for_priority=preempts)
    low, high = make_request("low"), make_request("high", priority=1)
    driver.add(low)
    driver.step()
    driver.add(high)
    driver.run()
    assert list(driver.finish_reasons) == (["high", "low"] if preempts else ["low", "high"])
    assert driver.tokens["low"] == expected_tokens(driver.executor, low)
    assert driver.scheduler.statistics().num_preemptions == preempts


def test_equal_priority_never_pushes_anybody_out_to_get_in() -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    driver.add(make_request("first", priority=1))
    driver.step()
    driver.add(make_request("second", priority=1))
    driver.run()
    assert driver.scheduler.statistics().num_preemptions == 0


def test_the_least_important_request_is_preempted_when_pages_run_out_and_loses_no_token() -> None:
    limits = make_limits(num_pages=8, max_seq_len=32)
    driver = make_driver(limits, draft_rule=always_wrong, reuses_prefixes=False)
    requests = [make_request(f"r{i}", range(i, i + 6), max_new_tokens=16) for i in range(3)]
    for request in requests:
        driver.add(request)
    driver.run()
    preempted = {event.request_id for event in driver.events if event.statistics and event.statistics.num_preemptions}
    assert preempted and "r0" not in preempted
    assert next(iter(driver.finish_reasons)) == "r0"
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)


def test_drafts_never_cost_another_request_its_page() -> None:
    limits = make_limits(num_pages=8, max_seq_len=32)
    plain, drafting = (
        make_driver(limits, num_draft_tokens=k, draft_rule=always_wrong, reuses_prefixes=False) for k in (0, 5)
    )
    for driver in (plain, drafting):
        for i in range(2):
            driver.add(make_request(f"r{i}", range(i, i + 3), max_new_tokens=12))
        driver.run()
        assert driver.scheduler.statistics().num_preemptions == 0
    assert max(row[2] for batch in shapes(drafting) for row in batch) == 5, "otherwise the test says nothing"


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.booleans())
def test_the_same_arrivals_give_the_same_batches(seed: int, is_ahead: bool) -> None:
    def batches() -> list[StepBatch]:
        driver = make_driver(make_limits(num_pages=10), draft_rule=right_with_probability(0.5))
        for i in range(6):
            driver.add(
                make_request(f"r{i}", [(seed >> i) % 7] * (1 + (seed >> 3 * i) % 9), priority=(seed >> 5 * i) % 2)
            )
        driver.run(ahead=is_ahead)
        return driver.executor.batches

    assert batches() == batches()


# Refusals and endings


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
    assert driver.scheduler.preempt("a")
    driver.run()
    assert list(driver.finish_reasons) == ["a", "b"]


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


def test_what_a_step_gave_a_request_cancelled_meanwhile_is_dropped() -> None:
    driver = make_driver()
    driver.add(make_request("r"))
    batch = driver.scheduler.schedule()
    driver.cancel("r")
    assert driver.scheduler.commit(batch, driver.executor.step(batch)) == []
    driver.scheduler.check_integrity()


def test_a_new_request_may_take_the_id_of_one_cancelled_in_flight() -> None:
    driver = make_driver()
    driver.add(make_request("r", (1, 2, 3)))
    batch = driver.scheduler.schedule()
    driver.cancel("r")
    driver.finish_reasons.clear()
    request = make_request("r", (4, 5))
    driver.add(request)
    assert driver.scheduler.commit(batch, driver.executor.step(batch)) == []
    driver.tokens.clear()
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_a_result_that_breaks_the_contract_fails_its_request_only() -> None:
    driver = make_driver()
    for name in ("bad", "good"):
        driver.add(make_request(name))
    batch = driver.scheduler.schedule()
    results = list(driver.executor.step(batch).requests)
    results[0] = RequestResult(
        emitted_tokens=(1, 2),
        logprobs=(),
        num_accepted=0,
        draft_tokens=(),
        next_context_len=results[0].next_context_len,
    )
    bad, good = driver.scheduler.commit(batch, StepResult(requests=tuple(results)))
    assert bad.finish_reason == "error" and "2 emitted tokens with num_accepted 0" in str(bad.error)
    assert good.finish_reason is None and good.token_ids


def test_a_parked_request_gives_its_place_away_and_goes_on_with_the_same_tokens() -> None:
    driver = make_driver(make_limits(max_batch_size=1), draft_rule=always_wrong)
    request = make_request("parked")
    driver.add(request)
    driver.step()
    assert driver.scheduler.park("parked")
    driver.scheduler.check_integrity()
    assert driver.scheduler.num_pages_in_use == 0
    assert not driver.scheduler.has_work
    driver.add(make_request("other"))
    driver.run()
    assert driver.finish_reasons == {"other": "length"}
    assert driver.scheduler.resume("parked")
    driver.run()
    assert driver.tokens["parked"] == expected_tokens(driver.executor, request)


def test_a_request_parked_too_long_ends_with_timeout() -> None:
    driver = make_driver(max_parked_s=10.0)
    driver.add(make_request("r"))
    driver.step()
    driver.scheduler.park("r")
    driver.now = 9.0
    driver.step()
    assert driver.finish_reasons == {}
    driver.now = 10.0
    driver.step()
    assert driver.finish_reasons == {"r": "timeout"}


# Prefix reuse


def run_twice(driver: Driver, first: Sequence[int], second: Sequence[int]) -> int:
    """Prompt tokens of the second request that were found computed."""
    for name, prompt in (("first", first), ("second", second)):
        request = make_request(name, prompt)
        driver.add(request)
        driver.run()
        assert driver.tokens[name] == expected_tokens(driver.executor, request)
    statistics = driver.events[-1].statistics
    assert statistics is not None
    return statistics.num_prefix_hit_tokens


def test_a_shared_system_prompt_is_computed_once() -> None:
    system = list(range(1, 11))
    assert run_twice(make_driver(), [*system, 20, 21], [*system, 30, 31, 32]) == 8  # 2 full pages of 4


def test_the_next_turn_of_a_chat_finds_prompt_and_answer() -> None:
    driver = make_driver()
    answer = driver.executor.target.generate(range(6), 12)
    assert run_twice(driver, range(6), [*range(6), *answer, 50, 51]) == 16  # of 18, the last token has no K/V yet


def test_the_same_prompt_again_computes_its_last_tokens_only() -> None:
    assert run_twice(make_driver(), range(12), range(12)) == 8


def test_without_prefix_reuse_nothing_is_found() -> None:
    assert run_twice(make_driver(reuses_prefixes=False), range(12), range(12)) == 0


def test_acceptance_after_a_hit_equals_acceptance_without() -> None:
    def blocks(*, reuses_prefixes: bool) -> list[tuple[int, int]]:
        driver = make_driver(reuses_prefixes=reuses_prefixes, draft_rule=right_with_probability(0.6))
        run_twice(driver, range(12), range(12))
        return [
            (event.num_candidates, event.num_accepted)
            for event in driver.events
            if event.request_id == "second" and event.num_candidates
        ]

    assert blocks(reuses_prefixes=True) == blocks(reuses_prefixes=False)


def test_a_running_request_shares_its_pages_before_it_ends() -> None:
    driver = make_driver(draft_rule=always_wrong)
    driver.add(make_request("first", range(12)))
    driver.step()
    driver.add(make_request("second", range(12)))
    driver.step()
    first, second = driver.executor.batches[-1].requests
    assert second.context_len == 8
    assert first.page_ids[:2] == second.page_ids[:2]


def test_a_preempted_request_finds_what_it_computed() -> None:
    driver = make_driver(draft_rule=always_wrong)
    request = make_request("r", range(12))
    driver.add(request)
    driver.step()
    driver.scheduler.preempt("r")
    driver.step()
    assert driver.executor.batches[-1].requests[0].context_len == 12
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


# Statistics and settings


def test_statistics_count_what_happened() -> None:
    driver = make_driver(draft_rule=right_with_probability(0.5))
    for i in range(5):
        driver.add(make_request(f"r{i}", range(9), max_new_tokens=20))
    driver.cancel("r4")
    driver.run()
    statistics = driver.scheduler.statistics()
    verified = [event for event in driver.events if event.num_candidates]
    assert statistics.num_arrivals == 5
    assert statistics.num_finished == {"length": 4, "cancelled": 1}
    assert statistics.num_steps == len(driver.executor.batches)
    assert statistics.num_computed_tokens == sum(batch.num_tokens for batch in driver.executor.batches)
    assert statistics.num_verify_blocks == len(verified)
    assert statistics.num_accepted_tokens == sum(event.num_accepted for event in verified)
    assert statistics.acceptance_length == 1 + statistics.num_accepted_tokens / len(verified)
    reached = [event for event in verified if event.num_accepted >= 1 and event.num_candidates >= 2]
    assert statistics.acceptance_by_position[1] == sum(event.num_accepted >= 2 for event in reached) / len(reached)
    assert statistics.num_admitted_prompt_tokens == 4 * 9
    assert statistics.num_pages_in_use_now == 0
    assert sum(statistics.num_steps_by_draft_length.values()) == statistics.num_steps


def test_statistics_of_an_unused_scheduler_have_no_fractions() -> None:
    statistics = make_driver().scheduler.statistics()
    assert statistics.acceptance_length is None
    assert statistics.prefix_hit_fraction is None


def test_an_engine_that_cannot_give_each_request_a_token_is_refused() -> None:
    with pytest.raises(CapacityError, match="at least max_batch_size 4, found 3"):
        Scheduler(make_limits(max_num_tokens=3))


def test_settings_out_of_range_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="2 problems"):
        SchedulerConfig(max_queue_len=0, max_prefill_tokens=-1)
