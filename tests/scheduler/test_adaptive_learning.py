"""What the adaptive policy learns, forgets and pays for knowing. Steps cost what they are said to: no noise."""

from collections.abc import Sequence
from itertools import count as count_from
from itertools import pairwise
from typing import Literal

import pytest

from dflash_trt.core.array import Array
from dflash_trt.scheduler import adaptive_draft_length
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, StepObservation
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.step_cost import StepCosts
from tests.fake_executor import FakeExecutor, right_with_probability
from tests.scheduler.driver import Driver, make_limits, make_request
from tests.scheduler.simulation import CostFunction, Device, gpu_cost_s, observation

EPOCHS = count_from(0)


def observe(
    policy: AdaptiveDraftLength, num_accepted: int, *, count: int, length: int = 7, elapsed_s: float = 1.0
) -> None:
    """`count` steps, each with a request of its own."""
    for _ in range(count):
        policy.observe(
            observation(
                num_draft_tokens=length,
                num_decoding=1,
                num_prefill_tokens=0,
                verified=((length, num_accepted),),
                elapsed_s=elapsed_s,
                first_epoch=next(EPOCHS),
            )
        )


def chosen(policy: DraftLengthPolicy, cost_s: CostFunction, acceptance: float, batch_sizes: Sequence[int]) -> list[int]:
    """K of each step."""
    lengths: list[int] = []

    class Spy(DraftLengthPolicy):
        has_budget = policy.has_budget

        def choose(self, num_decoding: int) -> int:
            lengths.append(policy.choose(num_decoding))
            return lengths[-1]

        def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
            return policy.limit(slots, epochs, num_candidates, confidence)

        def observe(self, step: StepObservation) -> None:
            policy.observe(step)

    Device(cost_s, acceptance, noise=0.0).run(Spy(), batch_sizes)
    return lengths


def test_old_acceptance_fades_and_recent_acceptance_counts() -> None:
    policy = AdaptiveDraftLength(7)
    observe(policy, 7, count=5000)
    speed = policy.tokens_per_second(1, 7)
    assert speed == pytest.approx(8.0, rel=0.1)
    observe(policy, 0, count=50)
    speed = policy.tokens_per_second(1, 7)
    assert speed > 4.0, "fifty blocks of five hundred"
    observe(policy, 0, count=1500)
    speed = policy.tokens_per_second(1, 7)
    assert speed < 1.6, "of 5,000 old blocks a twentieth is left of five hundred"


def test_decoding_without_drafts_is_tried_where_the_drafter_is_what_costs() -> None:
    """Steps that draft cannot tell what the drafter costs, so no estimate would speak for trying."""

    def drafter_bound_s(num_requests: int, num_verified: int, num_drafted: int) -> float:
        return 1e-3 + 0.05e-3 * num_requests * num_verified + (6e-3 if num_drafted else 0.0)

    lengths = chosen(AdaptiveDraftLength(7), drafter_bound_s, 0.8, [4] * 400)
    assert lengths.count(0) > 340


@pytest.mark.parametrize(("num_decoding", "is_free"), [(24, True), (16, False), (4, False), (3, True)])
def test_a_change_of_k_soon_after_another_is_free_where_the_batch_jumps(
    monkeypatch: pytest.MonkeyPatch, num_decoding: int, is_free: bool
) -> None:
    """By more than 2.2 times."""
    policy, speeds = AdaptiveDraftLength(4, lengths=(1, 2)), {1: 2.0, 2: 1.0}
    monkeypatch.setattr(policy, "tokens_per_second", lambda num_decoding, length: speeds[length])
    assert [policy.choose(8) for _ in range(3)] == [1] * 3, "it began with 2; a jump waits for no fifth step"
    speeds[2] = 2.2
    assert policy.choose(num_decoding) == (2 if is_free else 1)


def test_a_batch_counts_by_its_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of it is new with each step, so that K does not follow every request that ends."""
    policy, sizes = AdaptiveDraftLength(4, lengths=(1, 2)), list[int]()
    monkeypatch.setattr(
        policy, "tokens_per_second", lambda num_decoding, length: float(sizes.append(num_decoding) or 1.0)
    )
    for num_decoding in (10, 20, 20, 20, 20):
        policy.choose(num_decoding)
    assert dict.fromkeys(sizes) == {10: None, 13: None}


@pytest.mark.parametrize(
    ("lengths", "is_measured"), [((0,), True), ((3,), False), ((0, 3), False), ((3, 3), True), ((3, 0, 3), False)]
)
def test_the_first_step_that_drafts_again_is_not_measured(lengths: tuple[int, ...], is_measured: bool) -> None:
    """It has no drafts to verify, and perhaps a context to catch up with. K = 0 is slow here, K = 3 fast."""
    policy, length = AdaptiveDraftLength(7), lengths[-1]
    for each in lengths:
        policy.observe(
            observation(
                num_draft_tokens=each,
                num_decoding=4,
                num_prefill_tokens=0,
                verified=((each, 0),) * 4,
                elapsed_s=0.01 if each == length else 1000.0,
            )
        )
    usual = AdaptiveDraftLength(7).tokens_per_second(4, length)
    assert (policy.tokens_per_second(4, length) > 50 * usual) == is_measured, "before that, a row takes a second"


def test_a_probe_that_was_interrupted_for_long_forbids_no_others() -> None:
    batch_sizes = [1 + step // 40 * 7 % 48 for step in range(3000)]

    def num_late_changes(interruption_s: float) -> int:
        left_s = [interruption_s]

        def cost_s(num_requests: int, num_verified: int, num_drafted: int) -> float:
            usual_s = gpu_cost_s(num_requests, num_verified, num_drafted)
            return usual_s + (left_s.pop() if not num_drafted and left_s else 0.0)

        return sum(a != b for a, b in pairwise(chosen(AdaptiveDraftLength(7), cost_s, 0.1, batch_sizes)[200:]))

    assert num_late_changes(1000.0) > 0.5 * num_late_changes(0.0) > 10


def test_decoding_without_drafts_is_not_tried_again_where_a_similar_batch_has_told_its_cost() -> None:
    lengths = chosen(AdaptiveDraftLength(7, device="cuda"), gpu_cost_s, 0.9, [4] * 200 + [6] * 400)
    assert (lengths[:200].count(0), lengths[200:].count(0)) == (2, 0)


def test_a_probe_is_made_only_where_all_of_its_steps_can_be_paid_for() -> None:
    """Two steps of K = 0 lose the time of more than one; half a step is free, and a part of the time."""
    for max_probe_fraction, has_probe in ((0.0, False), (0.05, True)):
        policy = AdaptiveDraftLength(7, lengths=(0, 7), max_probe_fraction=max_probe_fraction, device="cuda")
        lengths = chosen(policy, lambda *_: 8e-3, 0.9, [4] * 200)
        assert (0 in lengths) == has_probe
        assert 0 not in lengths[:16]


def test_drafts_that_nobody_verified_are_taken_to_be_as_good_as_those_before_them() -> None:
    policies = AdaptiveDraftLength(2, device="cuda"), AdaptiveDraftLength(2, device="cuda")
    for policy, num_accepted in zip(policies, (1, 0), strict=True):
        observe(policy, num_accepted, count=400, length=1)
    gains = [policy.tokens_per_second(1, 2) / policy.tokens_per_second(1, 1) for policy in policies]
    assert gains[0] / gains[1] == pytest.approx((1 + 1 + 1) / (1 + 1), rel=0.03), "the costs are equal"


def test_a_length_whose_drafts_were_bad_by_chance_is_tried_again() -> None:
    """Its cost is known, but four blocks say little of its drafts."""
    policy = AdaptiveDraftLength(3, lengths=(0, 3))
    lengths: list[int] = []
    for step in range(200):
        lengths.append(policy.choose(1))
        policy.observe(
            observation(
                num_draft_tokens=lengths[-1],
                num_decoding=1,
                num_prefill_tokens=0,
                verified=((3, 0 if step < 4 else 3),) if lengths[-1] else (),
                elapsed_s=1.6 if lengths[-1] else 1.0,
            )
        )
    assert 0 in lengths and lengths[-100:] == [3] * 100


def test_a_single_slow_step_bounds_no_longer_length() -> None:
    costs = costs_of({(4, 0): 0.010, (8, 2): 0.011, (8, 6): 0.013}, count=20)
    costs.add(4, 2, 0.200, num_prefill_tokens=0, is_steady=True)
    found = costs.estimate(4, 4)
    assert found < 0.02


def test_a_probe_that_gives_as_many_tokens_a_second_costs_nothing() -> None:
    policy = AdaptiveDraftLength(7, lengths=(0, 3, 7), max_probe_fraction=0.0)
    observe(policy, 3, count=100, length=3)
    observe(policy, 7, count=20, length=7, elapsed_s=2.0)
    assert 0 in [policy.choose(1) for _ in range(8)], "it can still be paid for"


def test_a_step_of_prompts_alone_tells_nothing_of_those_that_decode() -> None:
    policy = AdaptiveDraftLength(7)
    before = policy.tokens_per_second(1, 0)
    policy.observe(observation(num_draft_tokens=0, num_decoding=0, num_prefill_tokens=9, verified=(), elapsed_s=1.0))
    assert policy.tokens_per_second(1, 0) == before


def test_probes_are_paid_for_from_their_share_of_the_time() -> None:
    """Batch sizes come and go, so that there is always something to learn."""
    batch_sizes = [1 + step // 40 * 7 % 48 for step in range(3000)]

    def num_changes(max_probe_fraction: float) -> int:
        policy = AdaptiveDraftLength(7, max_probe_fraction=max_probe_fraction)
        return sum(a != b for a, b in pairwise(chosen(policy, gpu_cost_s, 0.1, batch_sizes)))

    assert num_changes(0.0) < 0.25 * num_changes(0.5)


def test_the_real_loop_teaches_the_policy() -> None:
    """Through a scheduler: K settles on what the device is best at, which is not where it starts."""
    limits = make_limits(num_pages=200, max_seq_len=400, max_num_tokens=64, max_draft_len=7)
    executor = FakeExecutor(limits, draft_rule=right_with_probability(0.95))
    policy = AdaptiveDraftLength(7)
    driver = Driver(Scheduler(limits, policy=policy), executor)
    driver.add(make_request("r", max_new_tokens=390))
    while driver.scheduler.has_work:
        step = driver.scheduler.plan()
        driver.scheduler.commit(step, executor.submit(step.plan).result(), elapsed_s=gpu_cost_s(1, 7, 7))
    assert policy.choose(1) == 7


def costs_of(entries: dict[tuple[int, int], float], *, count: int = 3) -> StepCosts:
    costs = StepCosts()
    for (num_decoding, length), cost_s in entries.items():
        for _ in range(count):
            costs.add(num_decoding, length, cost_s, num_prefill_tokens=0, is_steady=True)
    return costs


def test_a_machine_that_slows_down_is_noticed_before_the_medians_are() -> None:
    costs = costs_of({(4, 2): 0.010}, count=40)
    for _ in range(12):
        costs.add(4, 2, 0.020, num_prefill_tokens=0, is_steady=True)
    slow = costs.estimate(4, 2)
    assert slow > 0.013


def test_a_kind_of_step_that_became_slow_for_good_is_no_slow_machine() -> None:
    """At first all K look slower; then this one's median says it."""
    costs = costs_of({(4, 2): 0.010, (4, 6): 0.020}, count=40)
    estimates = []
    for _ in range(400):
        costs.add(4, 2, 0.020, num_prefill_tokens=0, is_steady=True)
        estimates.append(costs.estimate(4, 6))
    assert estimates[20] > 0.028 and estimates[-1] < 0.022


def test_the_age_of_a_measurement_counts_all_steps_since_it() -> None:
    costs = StepCosts()
    for count, age in ((1, None), (2, None), (3, 0), (4, 0)):
        costs.add(4, 2, 0.01, num_prefill_tokens=0, is_steady=True)
        assert costs.age(4, 2) == age, count
    costs.add(4, 2, 0.01, num_prefill_tokens=0, is_steady=False)
    costs.add(4, 3, 0.01, num_prefill_tokens=0, is_steady=True)
    costs.add(0, 2, 0.01, num_prefill_tokens=9, is_steady=True)
    assert (costs.age(4, 2), costs.age(4, 3), costs.age(8, 2), costs.age(0, 2)) == (3, None, None, None)


def test_a_length_is_known_nearby_from_half_to_twice_as_many_requests() -> None:
    costs = costs_of({(16, 2): 0.01})
    known = [num_decoding for num_decoding in range(1, 64) if costs.is_known_nearby(num_decoding, 2)]
    assert (known[0], known[-1], len(known)) == (8, 34, 27)
    assert not costs.is_known_nearby(16, 3)


def test_a_step_whose_larger_part_computes_prompts_tells_nothing_of_its_drafts() -> None:
    costs = costs_of({(4, 0): 0.010, (16, 0): 0.012}, count=40)
    for _ in range(40):
        costs.add(0, 0, 0.004, num_prefill_tokens=256, is_steady=True)
    before = costs.estimate(4, 0)
    for _ in range(20):
        costs.add(4, 0, 0.030, num_prefill_tokens=2048, is_steady=True)
    assert costs.estimate(4, 0) == pytest.approx(before, rel=0.02)


def test_without_requests_k_stays() -> None:
    policy = AdaptiveDraftLength(7)
    assert policy.choose(64) == 0
    assert [policy.choose(0) for _ in range(9)] == [0] * 9


@pytest.mark.parametrize(("device", "lengths"), [("cpu", [7, 4, 3, 0, 0]), ("cuda", [7, 7, 7, 7, 3])])
def test_the_first_step_has_what_usually_pays(device: Literal["cpu", "cuda"], lengths: list[int]) -> None:
    """On a CPU a row costs; a GPU has some for nothing."""
    found = [AdaptiveDraftLength(7, device=device).choose(num_requests) for num_requests in (1, 2, 4, 8, 64)]
    assert found == lengths


def test_catching_up_with_the_context_is_paid_for_like_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end may leave what steps without drafts add to the drafter's context to the first step that drafts."""

    def first_probe() -> int:
        policy = AdaptiveDraftLength(7)
        step = observation(num_draft_tokens=0, num_decoding=8, num_prefill_tokens=0, verified=(), elapsed_s=3e-3)
        for number in range(2000):
            if policy.choose(8):
                return number
            policy.observe(step)
        return 2000

    paid = first_probe()
    monkeypatch.setattr(adaptive_draft_length, "_OBSERVE_FRACTION", 0.0)
    assert 16 < first_probe() < paid < 600


def test_only_what_came_since_the_last_drafts_is_to_be_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(StepCosts, "prefill_s", lambda self, num_tokens: float(asked.append(num_tokens) or 0.0))
    policy, num_since, num_probes = AdaptiveDraftLength(7), 0, 0
    for _ in range(600):
        length = policy.choose(8)
        assert set(asked) <= {0, num_since}
        asked.clear()
        num_since, num_probes = (0, num_probes + 1) if length else (num_since + 8, num_probes)
        elapsed_s = 3e-3 if length == 0 else 30e-3
        step = observation(
            num_draft_tokens=length, num_decoding=8, num_prefill_tokens=0, verified=(), elapsed_s=elapsed_s
        )
        policy.observe(step)
    assert num_probes > 1, "otherwise the test says nothing"


def test_a_length_is_never_taken_to_cost_more_than_a_longer_one_was_measured_to() -> None:
    """What a small batch costs would say so."""
    bounded = costs_of({(1, 2): 0.1, (4, 6): 0.01}).estimate(4, 2)
    unbounded = costs_of({(1, 2): 0.1}).estimate(4, 2)
    assert unbounded > 0.05, "otherwise the test says nothing"
    assert bounded <= 0.011
