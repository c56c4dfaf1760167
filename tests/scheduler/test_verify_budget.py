"""The drafts that a step verifies: the best number of them, what is known of a request, and what both gain."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import StepResult
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.verify_budget import ConfidenceRates, RequestRates, best_budget
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits, make_request
from tests.scheduler.simulation import CostFunction, Device, cpu_cost_s, observation

USUAL = np.array([0.8, 0.8, 0.8])
THREE, ONE = np.tile(USUAL, (3, 1)), USUAL[None]


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4), min_size=1, max_size=5),
    st.floats(0.1, 20.0),
    st.floats(0.0, 2.0),
)
def test_no_other_choice_of_drafts_gives_more_tokens_per_second(
    rates: list[list[float]], fixed_s: float, row_s: float
) -> None:
    reach = np.cumprod(rates, axis=1)
    budget = best_budget(reach, fixed_s=fixed_s, row_s=row_s)
    best = replace(budget, threshold=row_s * budget.tokens_per_second)

    def speed(counts: Sequence[int]) -> float:
        tokens = len(reach) + sum(row[:count].sum() for row, count in zip(reach, counts, strict=True))
        return float(tokens / (fixed_s + row_s * sum(counts)))

    chosen = best.num_candidates(reach).tolist()
    found = speed(chosen)
    assert found == pytest.approx(budget.tokens_per_second)
    more = budget.num_candidates(reach)
    assert (more >= chosen).all() and speed(more.tolist()) > 0.8 * found, "with those that are nearly worth it"
    for row in range(len(reach)):
        for count in range(5):
            assert speed([*chosen[:row], count, *chosen[row + 1 :]]) <= found * (1 + 1e-9)


def test_drafts_that_are_not_there_are_not_chosen() -> None:
    reach = np.array([[0.9, 0.8], [0.4, 0.0]])
    assert best_budget(reach, fixed_s=1.0, row_s=0.0).num_candidates(reach).tolist() == [2, 1]
    assert best_budget(reach, fixed_s=2.0, row_s=0.6).num_candidates(reach).tolist() == [2, 0]
    nothing = best_budget(np.zeros((3, 0)), fixed_s=1.5, row_s=0.1)
    assert (nothing.num_candidates(np.zeros((3, 0))).tolist(), nothing.tokens_per_second) == ([0, 0, 0], 2.0)


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4),
    st.integers(0, 3),
    st.floats(0.1, 20.0),
    st.floats(0.0, 2.0),
)
def test_no_choice_depends_on_what_comes_after_it(
    rates: list[list[float]], other: list[float], column: int, fixed_s: float, row_s: float
) -> None:
    """Rates after a draft may follow from its value. Otherwise the choice would bias the text."""
    changed = [[*rates[0][: column + 1], *other[column + 1 :]], *rates[1:]]
    counts = []
    for each in (rates, changed):
        reach = np.cumprod(each, axis=1)
        counts.append(best_budget(reach, fixed_s=fixed_s, row_s=row_s).num_candidates(reach)[0])
    assert min(counts[0], column + 1) == min(counts[1], column + 1)


def test_requests_are_told_apart_by_what_they_had_accepted() -> None:
    requests, slots, epochs = RequestRates(), np.array([0, 5, 2]), np.array([7, 8, 9])
    for _ in range(20):
        requests.observe(slots, epochs, np.array([3, 3, 0]), np.array([3, 0, 0]), THREE)
    good, bad, unknown = requests.reach(slots, epochs, THREE)
    assert unknown == pytest.approx(np.cumprod(USUAL))
    assert good[2] > 1.5 * unknown[2] and bad[0] < 0.4 * unknown[0]
    (new,) = requests.reach(np.array([5]), np.array([10]), ONE)
    assert new == pytest.approx(unknown), "another request in the slot"


def test_a_request_that_verified_nothing_for_long_is_believed_again() -> None:
    requests, slots, epochs = RequestRates(), np.array([0]), np.array([0])
    for _ in range(20):
        requests.observe(slots, epochs, np.array([3]), np.array([0]), ONE)
    (before,) = requests.reach(slots, epochs, ONE)
    for _ in range(100):
        requests.observe(slots, epochs, np.array([0]), np.array([0]), ONE)
    (after,) = requests.reach(slots, epochs, ONE)
    assert before[0] < 0.4 * USUAL[0] and after[0] > 0.8 * USUAL[0]


def cheap_rows_s(num_requests: int, num_verified: float, num_drafted: int) -> float:
    """A request costs more than a draft of it, as short contexts on a CPU do; see docs/benchmarks.md."""
    rows = num_requests * num_verified
    return (
        1e-3
        + 0.8e-3 * num_requests
        + 0.3e-3 * rows
        + (0.5e-3 + 0.06e-3 * num_requests * (num_drafted + 1)) * (num_drafted > 0)
    )


@pytest.mark.parametrize(
    ("cost_s", "num_requests", "least"),
    [(cpu_cost_s, 4, 1.08), (cheap_rows_s, 4, 1.2), (cheap_rows_s, 16, 1.2), (cheap_rows_s, 64, 1.2)],
)
def test_mixed_requests_gain_over_the_best_k_for_all(cost_s: CostFunction, num_requests: int, least: float) -> None:
    """Of half of the requests nearly every draft is accepted, of the others few. Costs are learned first."""
    device = Device(cost_s, [0.95, 0.3] * (num_requests // 2))
    adaptive = AdaptiveDraftLength(7)
    device.run(adaptive, [num_requests] * 800)
    best = max(device.run(FixedDraftLength(length), [num_requests] * 400) for length in range(8))
    assert device.run(adaptive, [num_requests] * 400) > least * best


def test_confidence_is_believed_as_far_as_drafts_with_it_were_accepted() -> None:
    confidences, given = ConfidenceRates(), np.array([[0.97, 0.5, 0.5]])
    before = confidences.rates(given, USUAL)
    assert before[0] == pytest.approx([0.97, 0.5, 0.5])
    for _ in range(200):
        confidences.observe(given, np.array([3]), np.array([1]))  # the third is never reached
    (after,) = confidences.rates(given, USUAL)
    assert after[0] > 0.97 and after[1] < 0.1
    unknown = confidences.rates(np.full((2, 3), np.nan), USUAL)
    assert unknown.tolist() == [USUAL.tolist()] * 2


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_policy_is_told_the_confidence_of_drafts_that_are_known(is_ahead: bool) -> None:
    """One step ahead, the drafts to verify are those of a step that runs still."""
    told: list[Array] = []

    class Spy(FixedDraftLength):
        has_budget = True

        def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
            told.append(confidence)
            return num_candidates

    limits = make_limits(max_draft_len=2)
    executor, scheduler = FakeExecutor(limits), Scheduler(limits, policy=Spy(2))
    scheduler.add(make_request("r", [1, 2, 3], max_new_tokens=30))

    def submit(number: float) -> tuple[PlannedStep, StepResult]:
        step = scheduler.plan()
        result = executor.submit(step.plan).result()
        return step, replace(result, draft_confidence=np.full(result.draft_tokens.shape, number, np.float32))

    pending = submit(0.25)
    for number in (0.5, 0.75):
        if not is_ahead:
            scheduler.commit(*pending)
        following = submit(number)
        if is_ahead:
            scheduler.commit(*pending)
        pending = following
    expected = np.nan if is_ahead else 0.25
    assert np.array_equal(told[0], np.full((1, 2), expected), equal_nan=True)


@pytest.mark.parametrize("width", [2, 7])
def test_an_engine_may_make_fewer_or_more_drafts_than_the_policy_chooses_from(width: int) -> None:
    policy, requests = AdaptiveDraftLength(4), np.arange(3)
    available = np.array([2, 0, 1])
    for _ in range(5):
        policy.choose(3)
        chosen = policy.limit(requests, requests, available, np.full((3, width), 0.9))
        assert (chosen <= available).all()
        policy.observe(
            observation(
                num_draft_tokens=4,
                num_decoding=3,
                num_prefill_tokens=0,
                verified=[(int(count), 0) for count in chosen],
                elapsed_s=1e-3,
            )
        )
