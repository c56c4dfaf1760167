"""Prefixes found computed, what the scheduler counts, and its settings."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dflash_trt.core.errors import CapacityError, ConfigError
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import always_wrong, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request


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
    assert run_twice(make_driver(enable_prefix_caching=False), range(12), range(12)) == 0


def test_acceptance_after_a_hit_equals_acceptance_without() -> None:
    def blocks(*, enable_prefix_caching: bool) -> list[tuple[int, int]]:
        driver = make_driver(enable_prefix_caching=enable_prefix_caching, draft_rule=right_with_probability(0.6))
        run_twice(driver, range(12), range(12))
        return [
            (event.num_candidates, event.num_accepted)
            for event in driver.events
            if event.request_id == "second" and event.num_candidates
        ]

    assert blocks(enable_prefix_caching=True) == blocks(enable_prefix_caching=False)


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
    statistics = driver.scheduler.statistics()
    assert (statistics.num_admitted_prompt_tokens, statistics.num_prefix_hit_tokens) == (12, 0), (
        "of its first admission"
    )
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_another_sample_begins_as_soon_as_the_pages_that_it_can_share_are_there() -> None:
    """One page of a prompt of two: the last token is computed by everybody."""
    driver = make_driver(max_prefill_tokens=6)
    first = make_request("first", range(8))
    driver.add(first)
    driver.add(replace(first, request_id="second", shares_prompt_of="first"))
    driver.step()
    driver.step()
    rows = [[(row.request_id, row.context_len) for row in batch.requests] for batch in driver.executor.batches]
    assert rows == [[("first", 0)], [("first", 6), ("second", 4)]]


def test_samples_do_not_wait_for_a_prompt_that_they_cannot_share() -> None:
    driver = make_driver(enable_prefix_caching=False)
    first = make_request("first", range(8))
    driver.add(first)
    driver.add(replace(first, request_id="second", shares_prompt_of="first"))
    driver.step()
    assert [row.request_id for row in driver.executor.batches[0].requests] == ["first", "second"]


def test_what_was_accepted_after_a_stop_token_is_no_part_of_a_prefix() -> None:
    """The slot has zeros there, but the page has the K/V of the drafts."""
    driver = make_driver()
    plain = driver.executor.target.generate((1, 2, 3), 2)
    driver.add(make_request("stops", max_new_tokens=50, stop_token_ids=[plain[1]]))
    driver.run()
    assert driver.events[-1].num_accepted == 5 and driver.tokens["stops"] == plain
    request = make_request("next", [1, 2, 3, *plain, 0, 0, 0, 9])
    driver.add(request)
    driver.run()
    assert driver.tokens["next"] == expected_tokens(driver.executor, request)


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
