"""The drafts that a step verifies: the best number of them, what is known of a request, and what both gain."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.verify_budget import RequestRates, best_budget
from tests.scheduler.simulation import CostFunction, Device, cpu_cost_s

USUAL = np.array([0.8, 0.8, 0.8])


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

    def speed(counts: Sequence[int]) -> float:
        tokens = len(reach) + sum(row[:count].sum() for row, count in zip(reach, counts, strict=True))
        return float(tokens / (fixed_s + row_s * sum(counts)))

    chosen = budget.num_candidates(reach).tolist()
    found = speed(chosen)
    assert found == pytest.approx(budget.tokens_per_second)
    assert sum(chosen) == budget.num_drafts
    for row in range(len(reach)):
        for count in range(5):
            assert speed([*chosen[:row], count, *chosen[row + 1 :]]) <= found * (1 + 1e-9)


def test_drafts_that_are_not_there_are_not_chosen_and_a_small_gain_leaves_none_out() -> None:
    reach = np.array([[0.9, 0.8], [0.5, 0.0]])
    assert best_budget(reach, fixed_s=1.0, row_s=0.0).num_candidates(reach).tolist() == [2, 1]
    assert best_budget(reach, fixed_s=2.0, row_s=0.6).num_candidates(reach).tolist() == [2, 0]
    assert best_budget(reach, fixed_s=2.0, row_s=0.6, least_gain=0.5).num_candidates(reach).tolist() == [2, 1]
    nothing = best_budget(np.zeros((3, 0)), fixed_s=1.5, row_s=0.1)
    assert (nothing.num_drafts, nothing.tokens_per_second) == (0, 2.0)


def test_requests_are_told_apart_by_what_they_had_accepted() -> None:
    requests, slots, epochs = RequestRates(), np.array([0, 5, 2]), np.array([7, 8, 9])
    for _ in range(20):
        requests.observe(slots, epochs, np.array([3, 3, 0]), np.array([3, 0, 0]), USUAL)
    good, bad, unknown = requests.reach(slots, epochs, USUAL)
    assert unknown == pytest.approx(np.cumprod(USUAL))
    assert good[2] > 1.5 * unknown[2] and bad[0] < 0.4 * unknown[0]
    (new,) = requests.reach(np.array([5]), np.array([10]), USUAL)
    assert new == pytest.approx(unknown), "another request in the slot"


def test_a_request_that_verified_nothing_for_long_is_believed_again() -> None:
    requests, slots, epochs = RequestRates(), np.array([0]), np.array([0])
    for _ in range(20):
        requests.observe(slots, epochs, np.array([3]), np.array([0]), USUAL)
    (before,) = requests.reach(slots, epochs, USUAL)
    for _ in range(100):
        requests.observe(slots, epochs, np.array([0]), np.array([0]), USUAL)
    (after,) = requests.reach(slots, epochs, USUAL)
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
    ("cost_s", "num_requests", "least"), [(cpu_cost_s, 4, 1.15), (cheap_rows_s, 16, 1.2), (cheap_rows_s, 64, 1.2)]
)
def test_mixed_requests_gain_over_the_best_k_for_all(cost_s: CostFunction, num_requests: int, least: float) -> None:
    """Of half of the requests nearly every draft is accepted, of the others few. Costs are learned first."""
    device = Device(cost_s, [0.95, 0.3] * (num_requests // 2))
    adaptive = AdaptiveDraftLength(7)
    device.run(adaptive, [num_requests] * 800)
    best = max(device.run(FixedDraftLength(length), [num_requests] * 400) for length in range(8))
    assert device.run(adaptive, [num_requests] * 400) > least * best
