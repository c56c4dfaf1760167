"""Requests whose tokens are constrained: what is planned for them, and how they end."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dflash_trt.core.errors import RequestError
from dflash_trt.core.step_plan import FinishedStep, StepPlan
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import FakeExecutor, always_wrong, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_driver, make_limits, make_request
from tests.scheduler.toy_constraint import ToyConstraint

VOCAB_SIZE = 50
CONSTRAINT = ToyConstraint(length=30, one_in=2, vocab_size=VOCAB_SIZE)


def driver_of(*, num_draft_tokens: int = 5, right: float = 0.7) -> Driver:
    rule = right_with_probability(right) if right else always_wrong
    return make_driver(num_draft_tokens=num_draft_tokens, draft_rule=rule, vocab_size=VOCAB_SIZE)


def test_drafts_that_the_constraint_refuses_are_not_verified() -> None:
    driver = driver_of(right=0.0)
    driver.add(make_request("a", max_new_tokens=40, constraint=CONSTRAINT))
    driver.run()
    tokens = driver.tokens["a"]
    blocks = [(row.context_len - 2, row.token_ids[1:]) for batch in driver.executor.batches for row in batch.requests]
    for num_before, drafts in blocks[1:]:
        matcher = CONSTRAINT.start(())
        matcher.advance(tokens[:num_before])
        assert matcher.num_allowed(drafts) == len(drafts)
    counts = [len(drafts) for _, drafts in blocks[1:]]
    assert 0 in counts and sum(counts) > 0, "drafts were cut, and not all of them"


def test_only_the_last_chunk_of_a_prompt_has_a_mask() -> None:
    driver = driver_of()
    driver.add(make_request("a", range(40), constraint=CONSTRAINT))
    steps = []
    for _ in range(2):  # 24 tokens a step
        steps.append(driver.scheduler.plan())
        driver.scheduler.commit(steps[-1], driver.executor.submit(steps[-1].plan).result())
    assert [step.plan.masks is not None for step in steps] == [False, True]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [0, 3, 5])
def test_the_tokens_are_those_of_one_token_at_a_time(is_ahead, num_draft_tokens) -> None:
    driver = driver_of(num_draft_tokens=num_draft_tokens)
    requests = [
        make_request(f"r{i}", [i, 7], max_new_tokens=40, seed=i, temperature=float(i % 2), constraint=constraint)
        for i, constraint in enumerate([CONSTRAINT, None, replace(CONSTRAINT, one_in=3), replace(CONSTRAINT, length=1)])
    ]
    requests += [
        make_request(
            f"stops{i}", [i, 9], max_new_tokens=40, stop_token_ids=range(0, VOCAB_SIZE, 7), constraint=CONSTRAINT
        )
        for i in range(3)
    ]
    for request in requests:
        driver.add(request)
    driver.run(ahead=is_ahead)
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)
    assert driver.finish_reasons == {
        request.request_id: "length" if request.constraint is None else "stop" for request in requests
    }
    assert any(driver.tokens[f"stops{i}"][-1] % 7 == 0 and len(driver.tokens[f"stops{i}"]) < 30 for i in range(3))


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("lengths", [(5, 1), (1, 5), (5, 0, 2), (4, 3, 2, 1)])
def test_the_tokens_are_those_of_one_token_at_a_time_whatever_k_is_next(lengths: tuple[int, ...], is_ahead) -> None:
    """Of more drafts than the next step verifies, no row of another request is masked."""
    turns, limits = itertools.cycle(lengths), make_limits()
    policy = SimpleNamespace(
        choose=lambda num_decoding: next(turns), observe=lambda step: None, has_budget=False, is_joint=False
    )
    executor = FakeExecutor(limits, vocab_size=VOCAB_SIZE, draft_rule=right_with_probability(0.7))
    scheduler = Scheduler(limits, policy=policy)
    driver = Driver(scheduler, executor)
    requests = [
        make_request(f"r{i}", [i, 7], max_new_tokens=40, seed=i, constraint=constraint)
        for i, constraint in enumerate([CONSTRAINT, replace(CONSTRAINT, one_in=3), None])
    ]
    for request in requests:
        driver.add(request)
    for turn in range(12):  # their prompts are computed again, with drafts left from before
        (driver.step_ahead if is_ahead else driver.step)()
        for request in requests[: turn % 4]:
            scheduler.pause(request.request_id)
            scheduler.resume(request.request_id)
    driver.run(ahead=is_ahead)
    for request in requests:
        assert driver.tokens[request.request_id] == expected_tokens(driver.executor, request)


def test_free_requests_are_chained_while_a_constrained_one_waits_for_its_tokens() -> None:
    driver = driver_of()
    driver.add(make_request("free", [1], max_new_tokens=40))
    driver.add(make_request("constrained", [2], max_new_tokens=40, constraint=CONSTRAINT))
    for _ in range(6):
        driver.step_ahead()
    names = [{row.request_id for row in batch.requests} for batch in driver.executor.batches]
    assert all("free" in step for step in names)
    assert not any("constrained" in step and "constrained" in after for step, after in itertools.pairwise(names))
    assert sum("constrained" in step for step in names) >= 3


class Unmasked(FakeExecutor):
    def submit(self, plan: StepPlan) -> FinishedStep:
        return super().submit(replace(plan, masks=None))


def test_a_token_that_the_constraint_refuses_ends_the_request_and_no_other() -> None:
    driver = driver_of()
    driver.executor = Unmasked(make_limits(), vocab_size=VOCAB_SIZE)
    driver.add(make_request("constrained", [2], max_new_tokens=40, constraint=CONSTRAINT, regex="a"))
    driver.add(make_request("free", [1], max_new_tokens=40))
    driver.run()
    assert driver.finish_reasons == {"constrained": "error", "free": "length"}
    (error,) = (event.error for event in driver.events if event.error)
    assert error.startswith("request 'constrained' regex: expected tokens that it allows, found token ")


@pytest.mark.parametrize(
    "fields", [{"regex": "a"}, {"json_schema": "{}"}, {"choice": ("a",)}, {"grammar": "start: /a/"}]
)
def test_a_grammar_that_nobody_compiled_is_refused(fields) -> None:
    driver = driver_of()
    with pytest.raises(RequestError, match=f"sampling {next(iter(fields))}: expected its compiled constraint"):
        driver.add(make_request("a", **fields))


def test_a_part_of_a_plan_has_the_masks_of_its_rows() -> None:
    driver = driver_of()
    for i in range(4):
        driver.add(make_request(f"r{i}", [i], max_new_tokens=40, constraint=CONSTRAINT if i != 1 else None))
    for _ in range(3):
        driver.step()
    plan = driver.scheduler.plan().plan
    parts = [plan.part(slice(start, start + 2)) for start in (0, 2)]
    assert named_masks(plan) == named_masks(parts[0]) | named_masks(parts[1])
    assert {name for name, _ in named_masks(parts[0])} == {"r0"}
    assert len(named_masks(plan)) > 3


def named_masks(plan: StepPlan) -> dict[tuple[str, int], bytes]:
    """Masks by request and row of its block."""
    assert plan.masks is not None
    places = [divmod(row, plan.rows.num_draft_tokens + 1) for row in plan.masks.rows.tolist()]
    return {(plan.rows.request_ids[r], j): bits.tobytes() for (r, j), bits in zip(places, plan.masks.bits, strict=True)}


def test_the_first_refused_draft_is_verified_with_rejection_sampling() -> None:
    """And no other: its row and those before have masks."""
    driver = driver_of(right=0.0)
    request = make_request("a", max_new_tokens=40, temperature=1.0, constraint=CONSTRAINT)
    driver.add(replace(request, is_reproducible=False))
    driver.run()
    blocks = [(row.context_len - 2, row.token_ids[1:]) for batch in driver.executor.batches for row in batch.requests]
    num_refused = []
    for num_before, drafts in blocks[1:]:
        matcher = CONSTRAINT.start(())
        matcher.advance(driver.tokens["a"][:num_before])
        num_refused.append(len(drafts) - matcher.num_allowed(drafts))
    assert max(num_refused) == 1 and len({len(drafts) for _, drafts in blocks[1:]}) > 1
