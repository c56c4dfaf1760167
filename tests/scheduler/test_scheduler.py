"""What the scheduler decides: who runs, with how many tokens and drafts."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.batch import StepBatch
from tests.fake_executor import always_wrong, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request


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


@pytest.mark.parametrize(("num_prompt_tokens", "num_drafts", "num_computed"), [(20, 3, 4), (3, 3, 3), (2, 4, 2)])
def test_verify_blocks_leave_a_quarter_of_the_step_to_a_newcomer_as_far_as_it_needs_that(
    num_prompt_tokens: int, num_drafts: int, num_computed: int
) -> None:
    driver = make_driver(make_limits(max_num_tokens=12, num_pages=40), draft_rule=always_wrong)
    for name in ("a", "b"):
        driver.add(make_request(name, range(4), max_new_tokens=40))
    driver.step()
    driver.step()
    assert shapes(driver)[1] == [("a", 6, 5), ("b", 6, 5)], "two verify blocks alone fill a step"
    driver.add(make_request("c", range(num_prompt_tokens)))
    driver.step()
    verified = [(name, 1 + num_drafts, num_drafts) for name in ("a", "b")]
    assert shapes(driver)[2] == [*verified, ("c", num_computed, 0)]


def test_drafts_never_keep_a_newcomer_waiting_however_small_the_step() -> None:
    driver = make_driver(make_limits(max_num_tokens=2, max_batch_size=2), draft_rule=always_wrong)
    driver.add(make_request("a", range(4), max_new_tokens=40))
    for _ in range(3):
        driver.step()
    driver.add(make_request("b", range(4)))
    driver.step()
    assert shapes(driver)[2:] == [[("a", 2, 1)], [("a", 1, 0), ("b", 1, 0)]]


def test_max_prefill_tokens_bounds_the_prompt_work_of_a_step() -> None:
    driver = make_driver(max_prefill_tokens=5)
    driver.add(make_request("r", range(12)))
    driver.run()
    assert [batch[0][1] for batch in shapes(driver)[:3]] == [5, 5, 2]


def test_a_bound_on_prompt_work_does_not_make_a_step_larger() -> None:
    """Verify blocks of three requests leave less than the bound allows."""
    driver = make_driver(make_limits(num_pages=80, max_num_tokens=20), draft_rule=always_wrong, max_prefill_tokens=18)
    for name in "abc":
        driver.add(make_request(name, range(4), max_new_tokens=40))
    driver.step()
    driver.add(make_request("d", range(18)))
    driver.run()
    assert max(batch.num_tokens for batch in driver.executor.batches) <= 20


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
    driver = make_driver(limits, draft_rule=always_wrong, enable_prefix_caching=False)
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
        make_driver(limits, num_draft_tokens=k, draft_rule=always_wrong, enable_prefix_caching=False) for k in (0, 5)
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


# Planning ahead


def test_nothing_is_planned_behind_a_step_that_certainly_ends_the_request() -> None:
    driver = make_driver()
    driver.add(make_request("r", max_new_tokens=1))
    first, second = driver.scheduler.plan(), driver.scheduler.plan()
    assert len(first.sequences) == 1 and second.sequences == []


@pytest.mark.parametrize("max_new_tokens", range(2, 16))
def test_a_chained_row_may_verify_more_than_can_be_emitted_and_is_cut(max_new_tokens: int) -> None:
    """It is planned when nobody knows how much the row before it emits."""
    plain, chained = make_driver(num_draft_tokens=4), make_driver(num_draft_tokens=4)
    for driver in (plain, chained):
        driver.add(make_request("r", max_new_tokens=max_new_tokens))
        driver.run(ahead=driver is chained)
        assert driver.tokens["r"] == driver.executor.target.generate((1, 2, 3), max_new_tokens)
        assert driver.finish_reasons["r"] == "length"
        for event in driver.events:
            assert event.num_accepted <= event.num_candidates
            assert len(event.token_ids) <= event.num_accepted + 1, "no event counts drafts that could not be emitted"


# Steps that repeat


@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain", "chained"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_steps_repeat_their_rows_until_somebody_comes_or_goes(right: float, is_ahead: bool) -> None:
    """Then nothing is packed or sent anew; tokens are those of each request alone."""
    limits = make_limits(max_seq_len=400, num_pages=600, max_num_tokens=64)
    driver = make_driver(limits, draft_rule=right_with_probability(right), vocab_size=50)
    requests = [
        make_request(
            f"r{i}", range(1, 5 + i), max_new_tokens=250 + 30 * i, stop_token_ids=(), seed=i, temperature=i % 2
        )
        for i in range(3)
    ]
    plans = []
    submit = driver.executor.submit
    driver.executor.submit = lambda plan: plans.append(plan) or submit(plan)  # type: ignore[method-assign]
    driver.add(requests[0])
    driver.add(requests[1])
    for _ in range(9):
        driver.step_ahead() if is_ahead else driver.step()
    driver.add(requests[2])
    driver.run(ahead=is_ahead)
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    num_repeated = sum(after.rows is before.rows for before, after in itertools.pairwise(plans))
    assert num_repeated > len(plans) // 2


def test_steps_repeat_their_rows_while_others_wait_for_a_place() -> None:
    limits = make_limits(max_batch_size=1, max_seq_len=200, num_pages=100)
    driver = make_driver(limits)
    for name in ("runs", "waits"):
        driver.add(make_request(name, max_new_tokens=100, priority=1))
    for _ in range(3):
        driver.step()
    step = driver.scheduler.plan()
    result = driver.executor.submit(step.plan).result()
    driver.scheduler.commit(step, result)
    assert driver.scheduler.plan().plan.rows is step.plan.rows


def test_logits_that_are_not_finite_end_a_request_whose_steps_repeat() -> None:
    driver = make_driver(make_limits(max_seq_len=200, num_pages=100))
    driver.add(make_request("r", max_new_tokens=100))
    for _ in range(3):
        driver.step()
    before, step = (driver.scheduler.plan(), None)
    driver.scheduler.commit(before, driver.executor.submit(before.plan).result())
    step = driver.scheduler.plan()
    assert step.plan.rows is before.plan.rows
    result = driver.executor.submit(step.plan).result()
    result.emitted_logprobs[0, 1] = float("nan")
    (event,) = driver.scheduler.commit(step, result)
    assert (event.finish_reason, len(event.token_ids)) == ("error", 1)


def test_a_policy_may_not_choose_more_drafts_than_the_engine_makes() -> None:
    driver = make_driver(num_draft_tokens=9)
    request = make_request("r")
    driver.add(request)
    driver.run()
    assert driver.tokens["r"] == expected_tokens(driver.executor, request)
    assert {batch.num_draft_tokens for batch in driver.executor.batches} <= {0, 5}


@pytest.mark.parametrize("is_ahead", [False, True], ids=["plain", "chained"])
def test_a_stop_token_ends_a_request_whose_steps_repeat(is_ahead: bool) -> None:
    limits = make_limits(max_seq_len=400, num_pages=600, max_num_tokens=64)
    driver = make_driver(limits, draft_rule=right_with_probability(0.6))
    plain = driver.executor.target.generate((1, 2, 3), 150)
    stop = next(token for index, token in enumerate(plain) if index > 90 and token not in plain[:index])
    driver.add(make_request("stops", max_new_tokens=300, stop_token_ids=[stop]))
    driver.add(make_request("goes on", max_new_tokens=300))
    driver.run(ahead=is_ahead)
    assert driver.tokens["stops"] == plain[: plain.index(stop) + 1]
    assert driver.finish_reasons == {"stops": "stop", "goes on": "length"}
    assert len(driver.tokens["goes on"]) == 300
