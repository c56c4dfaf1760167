"""What the scheduler hands on and counts: every number apart from every other."""

from dataclasses import asdict

import pytest

from dflash_trt.core.batch import StepSampling
from dflash_trt.core.errors import ConfigError
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import FakeExecutor, always_wrong, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request
from tests.scheduler.test_scheduler_laws import AnyK


def request_ids(driver: Driver) -> list[list[str]]:
    """Of each step's rows."""
    return [[row.request_id for row in batch.requests] for batch in driver.executor.batches]


def test_a_row_carries_its_requests_sampling_in_prefill_and_verify_steps() -> None:
    for is_ahead in (False, True):
        driver = make_driver()
        options = {"temperature": 0.7, "top_k": 11, "top_p": 0.8, "min_p": 0.1}
        driver.add(make_request("r", max_new_tokens=20, seed=2**40 + 3, **options))
        driver.run(ahead=is_ahead)
        rows = [row for batch in driver.executor.batches for row in batch.requests]
        assert len(rows) > 2
        assert {row.sampling for row in rows} == {StepSampling(**options, seed=2**40 + 3)}


def test_an_event_says_where_its_step_began_and_what_it_verified() -> None:
    driver = make_driver(draft_rule=right_with_probability(0.5))
    driver.add(make_request("r", range(6), max_new_tokens=20))
    driver.run()
    first, *verified = driver.events
    assert (first.context_len, first.num_candidates, first.num_accepted) == (0, 0, 0)
    position = 6
    for event in verified:
        assert event.context_len == position
        position += event.num_accepted + 1
    assert {event.num_accepted for event in verified} > {0, 1}


def test_prefixes_are_shared_within_a_salt_only() -> None:
    driver = make_driver(make_limits(num_pages=40))
    hits = []
    for number, salt in enumerate(("a", "b", "a", "", "b", "")):
        request = make_request(f"r{number}", range(12), cache_salt=salt)
        driver.add(request)
        driver.run()
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
        statistics = driver.events[-1].statistics
        assert statistics is not None
        hits.append(statistics.num_prefix_hit_tokens)
    assert hits == [0, 0, 8, 0, 8, 8]


def test_what_admission_needs_is_counted_within_the_salt() -> None:
    """Pages kept for another salt are no help: the request waits for as many as it needs."""
    driver = make_driver(make_limits(num_pages=6), draft_rule=always_wrong)
    driver.add(make_request("runs", range(12), max_new_tokens=4, cache_salt="a"))
    driver.step()
    driver.add(make_request("shares", range(12), max_new_tokens=1, cache_salt="a"))
    driver.add(make_request("does not", range(12), max_new_tokens=1, cache_salt="b"))
    driver.step()
    assert request_ids(driver)[-1] == ["runs", "shares"]
    driver.run()
    assert driver.scheduler.statistics().num_preemptions == 0


def test_each_statistic_counts_its_own_thing() -> None:
    driver = make_driver(
        make_limits(max_batch_size=3, num_pages=14), draft_rule=right_with_probability(0.5), num_draft_tokens=3
    )
    for name in ("first", "again"):
        driver.add(make_request(name, range(12), max_new_tokens=7))
        driver.run()
    for number in range(5):
        driver.add(make_request(f"r{number}", range(100 + 20 * number, 106 + 20 * number), max_new_tokens=30))
    driver.step()
    driver.step()
    driver.scheduler.pause("r0")
    driver.scheduler.preempt("r1")
    counted = asdict(driver.scheduler.statistics())
    verified = [event for event in driver.events if event.num_candidates]
    steps = [batch.num_draft_tokens for batch in driver.executor.batches]
    pool = driver.scheduler._request_pool
    in_use = len({page for sequence in pool.running for page in pool.page_ids(sequence)})
    expected = {
        "num_arrivals": 7,
        "num_finished": {"length": 2},
        "num_waiting_now": 3,
        "num_running_now": 1,
        "num_paused_now": 1,
        "num_steps": len(steps),
        "num_steps_by_draft_length": {length: steps.count(length) for length in sorted(set(steps))},
        "num_verify_blocks": len(verified),
        "num_draft_tokens": sum(event.num_candidates for event in verified),
        "num_accepted_tokens": sum(event.num_accepted for event in verified),
        "num_emitted_by_verify": sum(event.num_accepted + 1 for event in verified),
        "acceptance_by_position": tuple(
            sum(event.num_accepted > i for event in reached) / len(reached) if reached else None
            for i in range(5)
            for reached in [[event for event in verified if event.num_candidates > i <= event.num_accepted]]
        ),
        "num_preemptions": 1,
        "num_admitted_prompt_tokens": 12 + 12 + 3 * 6,
        "num_prefix_hit_tokens": 8,
        "num_pages": 14,
        "num_pages_in_use_now": in_use,
    }
    assert {name: counted[name] for name in expected} == expected
    assert driver.scheduler.statistics().prefix_hit_fraction == 8 / 42
    assert any(event.num_candidates not in (0, 3) for event in verified), "else K alone would do for the drafts"
    assert (
        counted["num_pages_kept_now"] == len(driver.scheduler._request_pool.store._tree.page_ids()) not in (0, in_use)
    )
    assert counted["num_evicted_pages"] == 0


def test_evicted_pages_are_counted_apart_from_preemptions() -> None:
    driver = make_driver(make_limits(num_pages=6))
    for number in range(3):
        driver.add(make_request(f"r{number}", range(20 * number, 20 * number + 12), max_new_tokens=4))
        driver.run()
    statistics = driver.scheduler.statistics()
    assert statistics.num_evicted_pages == 1 + 3, "each runs on 4 of the 6 pages and leaves 3 full ones"
    assert statistics.num_preemptions == 0


# Ends


def test_an_end_in_the_queue_is_work_until_it_is_told() -> None:
    driver = make_driver()
    driver.add(make_request("r", queue_timeout_s=1.0))
    driver.scheduler.expire(2.0)
    assert driver.scheduler.num_waiting == 0 and driver.scheduler.has_work
    driver.now = 2.0
    driver.run()
    assert driver.finish_reasons == {"r": "timeout"}


def test_a_request_cancelled_as_soon_as_it_came_did_not_wait() -> None:
    driver = make_driver()
    driver.now = 5.0
    driver.add(make_request("r"))
    driver.cancel("r")
    (event,) = driver.events
    assert event.statistics is not None and event.statistics.queue_time_s == 0.0


def test_a_chunk_of_a_prompt_that_was_preempted_meanwhile_gives_no_token() -> None:
    driver = make_driver(make_limits(max_num_tokens=8))
    request = make_request("r", range(20))
    driver.add(request)
    step = driver.scheduler.plan()
    assert driver.scheduler.preempt("r")
    assert driver.scheduler.commit(step, driver.executor.submit(step.plan).result()) == []
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_one_row_at_most_is_computed_after_a_stop_token() -> None:
    """That of the step which was submitted behind it."""
    driver = make_driver(draft_rule=always_wrong)
    plain = driver.executor.target.generate((1, 2, 3), 12)
    driver.add(make_request("r", max_new_tokens=50, stop_token_ids=[plain[4]]))
    driver.run(ahead=True)
    assert driver.tokens["r"] == plain[:5]
    assert len(driver.executor.batches) == 5 + 1


def test_a_request_never_holds_more_pages_than_its_longest_text_needs() -> None:
    """A chained row is planned for the longest outcome of the row before it, which may be past the end."""
    for is_ahead in (False, True):
        driver = make_driver(enable_prefix_caching=False, draft_rule=always_wrong, num_draft_tokens=4)
        driver.add(make_request("r", range(6), max_new_tokens=6))  # 12 positions: 3 pages
        most = 0
        while driver.scheduler.has_work:
            driver.step_ahead() if is_ahead else driver.step()
            most = max(most, driver.scheduler.num_pages_in_use)
        driver.land()
        assert most == 3 + is_ahead


def test_a_request_that_ends_while_a_step_runs_from_before_its_preemption_ends_once() -> None:
    driver = make_driver()
    driver.add(make_request("r"))
    driver.step()
    driver.leave_in_flight(lambda ids: (driver.scheduler.preempt("r"), driver.cancel("r")))
    assert driver.finish_reasons == {"r": "cancelled"}
    assert not driver.scheduler.has_work


@pytest.mark.parametrize("max_new_tokens", [10, 13])
def test_both_rows_of_a_request_sent_back_while_two_steps_run_count(max_new_tokens: int) -> None:
    """It waits for the newer step, and no token goes beyond its length."""
    driver = make_driver()
    request = make_request("r", max_new_tokens=max_new_tokens)
    driver.add(request)
    driver.step()
    first = driver.scheduler.plan()
    second = driver.scheduler.plan()
    results = [driver.executor.submit(step.plan).result() for step in (first, second)]
    assert len(first.sequences) == len(second.sequences) == 1
    driver.scheduler.preempt("r")
    driver._take(driver.scheduler.commit(first, results[0]))
    third = driver.scheduler.plan()
    assert third.sequences == []
    driver._take(driver.scheduler.commit(second, results[1]))
    driver.scheduler.commit(third, None)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_a_request_sent_back_while_its_step_is_planned_runs_again_if_that_step_does_not() -> None:
    driver = make_driver()
    request = make_request("r")
    driver.add(request)
    driver.step()
    driver.plan_and_abandon(lambda ids: driver.scheduler.preempt("r"))
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_pages_of_a_lost_device_are_found_by_nobody() -> None:
    driver = make_driver()
    for name in ("before", "runs"):
        driver.add(make_request(name, range(12)))
        driver.step()
    driver.scheduler.lose_device("gone")
    statistics = driver.scheduler.statistics()
    assert (statistics.num_pages_kept_now, statistics.num_finished) == (0, {"error": 2})


def test_steps_of_a_lost_device_are_forgotten_and_those_who_wait_run_on_the_next() -> None:
    driver = make_driver(make_limits(max_batch_size=1))
    requests = [make_request(name, range(12)) for name in ("runs", "waits")]
    for request in requests:
        driver.add(request)
    assert [len(driver.scheduler.plan().sequences) for _ in range(2)] == [1, 1]
    (failed,) = driver.scheduler.lose_device("gone")
    assert (failed.request_id, failed.finish_reason, failed.error) == ("runs", "error", "gone")
    driver.run()
    assert driver.tokens["waits"] == expected_tokens(driver.executor, requests[1])


# Order


def test_pages_that_requests_of_higher_priority_share_free_nothing() -> None:
    """Sending "low" back would give one page, not four, and "middle" may not be sent back at all."""
    driver = make_driver(make_limits(num_pages=8), draft_rule=always_wrong)
    driver.add(make_request("middle", range(12), priority=1, max_new_tokens=4))
    driver.step()
    driver.add(make_request("low", range(12), max_new_tokens=4))
    driver.step()
    driver.add(make_request("high", range(50, 66), priority=1))
    driver.step()
    assert request_ids(driver)[-1] == ["middle", "low"]
    assert driver.scheduler.statistics().num_preemptions == 0


def test_a_request_of_higher_priority_pushes_out_the_least_important_one_only() -> None:
    driver = make_driver(make_limits(max_batch_size=2), draft_rule=always_wrong)
    driver.add(make_request("middle", priority=1, max_new_tokens=30))
    driver.add(make_request("low", priority=0, max_new_tokens=30))
    driver.step()
    driver.add(make_request("high", priority=2))
    driver.step()
    assert request_ids(driver)[-1] == ["middle", "high"]


@pytest.mark.parametrize("preempts", [True, False])
def test_steps_stop_repeating_for_a_request_that_may_push_out_the_last_one(preempts: bool) -> None:
    limits = make_limits(max_batch_size=2, max_seq_len=200, num_pages=100)
    driver = make_driver(limits, preempts_for_priority=preempts)
    for name, priority in (("high", 2), ("low", 0)):
        driver.add(make_request(name, priority=priority, max_new_tokens=150))
    for _ in range(4):
        driver.step()
    before = driver.scheduler.plan()
    driver.scheduler.commit(before, driver.executor.submit(before.plan).result())
    driver.add(make_request("middle", priority=1))
    step = driver.scheduler.plan()
    assert (step.plan.rows is before.plan.rows) != preempts, "it repeats where nobody may be sent back"
    names = [sequence.request_id for sequence in step.sequences]
    assert names == ["high", "middle" if preempts else "low"]


def test_pages_of_lower_priority_make_room_for_a_request_of_higher_priority() -> None:
    driver = make_driver(make_limits(num_pages=5), draft_rule=always_wrong, enable_prefix_caching=False)
    driver.add(make_request("low", range(12), max_new_tokens=5))
    driver.step()
    driver.add(make_request("high", range(12), max_new_tokens=1, priority=1))
    driver.step()
    assert request_ids(driver)[-1] == ["high"]


def test_a_prompt_that_gets_no_token_of_a_step_has_no_row_in_it() -> None:
    driver = make_driver(max_prefill_tokens=5)
    for name in ("a", "b"):
        driver.add(make_request(name, range(5), max_new_tokens=9))
    driver.step()
    driver.step()
    assert request_ids(driver) == [["a"], ["a", "b"]]


def test_the_defaults_are_those_of_the_documents() -> None:
    config = SchedulerConfig()
    assert (config.max_queue_len, config.max_prefill_tokens, config.max_paused_s) == (None, None, 60.0)
    assert (config.enable_prefix_caching, config.preempts_for_priority, config.ngram) == (True, True, False)


@pytest.mark.parametrize("name", ["max_queue_len", "max_prefill_tokens"])
def test_a_bound_of_one_is_allowed_and_zero_is_not(name: str) -> None:
    SchedulerConfig(**{name: 1})
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: 0})


def test_a_request_sent_back_while_its_step_runs_waits_for_the_end_of_that_step() -> None:
    """Its pages are gone, so that nothing may follow on what the running step writes."""
    driver = make_driver(draft_rule=always_wrong)
    request = make_request("r", max_new_tokens=20)
    driver.add(request)
    running = driver.scheduler.plan()
    assert driver.scheduler.preempt("r")
    behind = driver.scheduler.plan()
    assert behind.sequences == []
    driver._take(driver.scheduler.commit(running, driver.executor.submit(running.plan).result()))
    driver.scheduler.commit(behind, None)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)


def test_the_rate_of_prompts_is_a_mean_in_tokens_of_steps_that_compute_prompts() -> None:
    driver = make_driver(make_limits(max_num_tokens=60, num_pages=60), draft_rule=always_wrong)

    def step(elapsed_s: float | None) -> float | None:
        planned = driver.scheduler.plan()
        driver.scheduler.commit(planned, driver.executor.submit(planned.plan).result(), elapsed_s=elapsed_s)
        return driver.scheduler.prompt_rate

    driver.add(make_request("a", range(40), max_new_tokens=20))
    assert step(0.5) == 80.0
    assert step(0.001) == 80.0, "a verify block is no prompt"
    driver.add(make_request("b", range(100, 154), max_new_tokens=2))
    assert step(1.5) == (80.0 + 60 / 1.5) / 2, "54 tokens, and 6 of the first one"
    driver.add(make_request("c", range(200, 254), max_new_tokens=2))
    assert step(None) == 60.0, "a step without a time"


def test_a_policy_learns_no_time_of_a_step_that_copies_pages() -> None:
    seen: list[tuple[float | None, int]] = []

    class Watching(AnyK):
        def observe(self, step: StepObservation) -> None:
            seen.append((step.elapsed_s, step.num_prefill_tokens))

    limits = make_limits(num_pages=8, num_host_pages=20)
    driver = Driver(Scheduler(limits, policy=Watching()), FakeExecutor(limits))
    has_copies = []
    for name, prompt in (("a", range(20)), ("b", range(30, 50)), ("again", range(20))):
        driver.add(make_request(name, prompt, max_new_tokens=2))
        while driver.scheduler.has_work:
            planned = driver.scheduler.plan()
            has_copies.append(len(planned.plan.page_copies) > 0)
            driver.scheduler.commit(planned, driver.executor.submit(planned.plan).result(), elapsed_s=2.5)
    assert {*has_copies} == {False, True}
    assert [elapsed_s for elapsed_s, _ in seen] == [None if copies else 2.5 for copies in has_copies]
