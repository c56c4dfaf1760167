"""Drafts from a request's own text: the index against Python's search in strings, and the rows that verify them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import CHAINED
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.ngram_index import MIN_MATCH, NgramIndex
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import FakeExecutor, always_wrong
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request
from tests.scheduler.test_scheduler_laws import AnyK
from tests.scheduler.toy_constraint import ToyConstraint

MAX_MATCH = 32
LIMITS = make_limits(max_seq_len=200, num_pages=200)


def drafts_by_search(text: str, num_drafts: int) -> str:
    """What follows the latest place of the longest suffix that occurs earlier, by `str.rfind`."""
    for length in range(min(MAX_MATCH, len(text) - 1), MIN_MATCH - 1, -1):
        start = text.rfind(text[-length:], 0, len(text) - 1)
        if start >= 0:
            period = len(text) - start - length
            return (text[-period:] * num_drafts)[:num_drafts]
    return ""


@given(parts=st.lists(st.text("ab", max_size=12), min_size=1, max_size=5), num_drafts=st.integers(1, 9))
def test_drafts_follow_the_longest_match(parts: list[str], num_drafts: int) -> None:
    index = NgramIndex()
    for part in parts:
        index.extend([ord(letter) for letter in part])
        text = "".join(map(chr, index.drafts(num_drafts)))
        assert text == drafts_by_search("".join(parts)[: len(index)], num_drafts)


@pytest.mark.parametrize("length", [MIN_MATCH - 1, MIN_MATCH, MIN_MATCH + 1, MAX_MATCH, MAX_MATCH + 9])
def test_a_match_needs_its_length_and_the_latest_of_the_long_ones_wins(length: int) -> None:
    index, repeated = NgramIndex(), list(range(100, 100 + length))
    index.extend([1, *repeated, 2, 3, 4, *repeated, 5, 6, 7, *repeated])
    assert index.drafts(2) == ([] if length < MIN_MATCH else [5, 6])


def driver_of(*, ngram: bool = True, vocab_size: int = 2) -> Driver:
    """A target of two tokens, whose texts repeat themselves, and a drafter that is always wrong."""
    return make_driver(LIMITS, draft_rule=always_wrong, vocab_size=vocab_size, ngram=ngram)


def requests_of(*, num_requests: int = 3, **fields: object) -> list[object]:
    return [make_request(f"r{i}", [i % 2, 1, 0], max_new_tokens=90 + i, seed=i, **fields) for i in range(num_requests)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_one_token_at_a_time(temperature: float) -> None:
    driver, requests = driver_of(), requests_of(temperature=temperature)
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)


def test_drafts_of_texts_are_counted_apart_from_those_of_the_drafter() -> None:
    driver = driver_of()
    for request in requests_of():
        driver.add(request)
    driver.run()
    counts = driver.scheduler.statistics()
    steps = [event for event in driver.events if event.ngram_draft_token_ids]
    assert counts.num_ngram_draft_tokens == sum(event.num_candidates for event in steps) > 0
    assert counts.num_ngram_accepted_tokens == sum(event.num_accepted for event in steps) > 0
    assert counts.num_accepted_tokens == counts.num_ngram_accepted_tokens, "the drafter is always wrong"
    assert counts.num_draft_tokens > counts.num_ngram_draft_tokens
    for event in steps:
        accepted = event.token_ids[: event.num_accepted]
        assert event.ngram_draft_token_ids[: len(accepted)] == accepted
        assert len(event.ngram_draft_token_ids) >= event.num_candidates


def test_no_draft_is_of_a_text_unless_the_scheduler_is_told() -> None:
    driver = driver_of(ngram=False)
    for request in requests_of():
        driver.add(request)
    for _ in range(20):
        driver.step()
    assert driver.scheduler.statistics().num_draft_tokens > 0
    assert not [event for event in driver.events if event.ngram_draft_token_ids]


def test_a_row_of_drafts_from_the_text_is_given_beside_chained_ones() -> None:
    driver = driver_of(vocab_size=997)
    driver.add(make_request("repeats", [1, 2, 3, 4, 5, 6, 7] * 2, max_new_tokens=40))
    driver.add(make_request("does not", [9, 8, 7], max_new_tokens=40))
    driver.step()
    first = driver.tokens["repeats"]
    assert first != [1], "the target does not copy: its text matches nothing"
    step = driver.scheduler.plan()
    assert (step.plan.rows.context_lens == CHAINED).all()
    driver.scheduler.abandon()
    sequence = driver.scheduler._request_pool.find("repeats")
    assert sequence is not None and sequence.slot is not None
    table = driver.scheduler._request_pool.table
    table.token_ids[sequence.slot, table.num_tokens[sequence.slot] - 1] = 1  # as if it did
    sequence.ngram_index = NgramIndex()
    rows = driver.scheduler.plan().plan.rows
    assert rows.context_lens.tolist() == [14, CHAINED]
    assert rows.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]


def test_a_loop_that_plans_ahead_has_drafts_of_texts_only_for_rows_that_wait_for_their_tokens() -> None:
    driver = driver_of(vocab_size=3)
    constraint = ToyConstraint(length=80, one_in=3, vocab_size=3)
    requests = [*requests_of(num_requests=2), make_request("c", [2, 1], max_new_tokens=80, constraint=constraint)]
    for request in requests:
        driver.add(request)
    driver.run(ahead=True)
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    assert {event.request_id for event in driver.events if event.ngram_draft_token_ids} == {"c"}


def test_steady_steps_repeat_until_a_text_matches() -> None:
    """And with drafts from a text, no step is a repetition of the last one."""
    driver = driver_of(vocab_size=997)
    driver.add(make_request("a", [1, 2, 3], max_new_tokens=80))
    plans = []
    for _ in range(5):
        step = driver.scheduler.plan()
        plans.append(step.plan)
        driver.scheduler.commit(step, driver.executor.submit(step.plan).result())
    assert plans[2].rows is plans[3].rows is plans[4].rows
    driver = driver_of(vocab_size=1)
    driver.add(make_request("a", [0] * 9, max_new_tokens=80))
    driver.run()
    assert all(event.ngram_draft_token_ids for event in driver.events[1:-1])


def test_a_budget_is_asked_of_the_drafters_drafts_alone() -> None:
    """The confidence in the slot of a row with drafts from its text is of other drafts."""
    asked: list[tuple[list[int], list[bool]]] = []

    class Watching(AnyK):
        has_budget = True

        def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
            asked.append((slots.tolist(), np.isnan(confidence).all(1).tolist()))
            return np.zeros_like(num_candidates)

    policy = Watching()
    policy.num_draft_tokens = 5
    driver = Driver(Scheduler(LIMITS, SchedulerConfig(ngram=True), policy), FakeExecutor(LIMITS))
    driver.add(make_request("repeats", [1, 2, 3, 4, 5, 6, 7] * 2, max_new_tokens=40))
    driver.add(make_request("does not", [9, 8, 7], max_new_tokens=40))
    driver.step()
    pool = driver.scheduler._request_pool
    sequence = pool.find("repeats")
    assert sequence is not None and sequence.slot is not None
    pool.table.draft_confidence[:] = 0.5
    pool.table.token_ids[sequence.slot, pool.table.num_tokens[sequence.slot] - 1] = 1  # as if the target copied
    sequence.ngram_index = NgramIndex()
    rows = driver.scheduler.plan().plan.rows
    ((slots, are_unknown),) = asked
    assert dict(zip(slots, are_unknown, strict=True)) == {slot: slot == sequence.slot for slot in slots}
    assert dict(zip(rows.slot_ids.tolist(), rows.num_candidates.tolist(), strict=True))[sequence.slot] == 5
    assert sorted(rows.num_candidates.tolist()) == [0, 5], "the policy leaves out what the drafter made"
