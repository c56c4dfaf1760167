"""The executor without a device: a scheduler runs on it as on any, with results made up as they were asked for."""

import numpy as np
import pytest

from dflash_trt.core.step_plan import StepPlan
from dflash_trt.executor.idle import IdleExecutor, MadeUpResults
from dflash_trt.scheduler.scheduler import Scheduler
from tests.scheduler.driver import make_limits, make_request

LIMITS = make_limits(num_pages=400, max_seq_len=300, max_num_tokens=64)


def run(executor: IdleExecutor, *, max_new_tokens: int = 200) -> tuple[Scheduler, list[StepPlan]]:
    scheduler, plans = Scheduler(LIMITS), []
    for number in range(3):
        scheduler.add(make_request(f"r{number}", range(10 + number), max_new_tokens=max_new_tokens))
    while scheduler.has_work:
        step = scheduler.plan()
        plans.append(step.plan)
        events = scheduler.commit(step, executor.submit(step.plan).result())
        assert {event.error for event in events} == {None}, "context lengths follow the step contract"
    assert scheduler.statistics().num_finished == {"length": 3}
    return scheduler, plans


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_each_draft_is_accepted_with_the_probability_that_was_asked_for(acceptance: float) -> None:
    rates = run(IdleExecutor(LIMITS, acceptance=acceptance))[0].statistics().acceptance_by_position
    assert rates[0] == pytest.approx(acceptance, abs=0.12)
    assert run(IdleExecutor(LIMITS))[0].statistics().acceptance_by_position[0] == pytest.approx(0.7, abs=0.12)


def test_a_seed_gives_the_same_results_and_another_one_others() -> None:
    counts = [run(IdleExecutor(LIMITS, seed=seed))[0].statistics().num_accepted_tokens for seed in (1, 1, 2, 3)]
    assert counts[0] == counts[1] and len(set(counts)) > 1


def test_the_host_s_time_is_measured_between_a_result_and_the_next_submission() -> None:
    executor = IdleExecutor(LIMITS)
    _, plans = run(executor)
    assert len(executor.between_s) == len(plans) - 1 and min(executor.between_s) > 0
    assert executor.own_s > 0 and executor.has_queue and not executor.can_retry
    assert executor.limits is LIMITS
    executor.between_s.clear()
    scheduler = Scheduler(LIMITS)
    scheduler.add(make_request("r"))
    step = executor.submit(scheduler.plan().plan)
    assert step.elapsed_s == 1e-3
    step.result()
    assert len(executor.between_s) == 1, "the last result of the run before was read"
    for _ in range(2):
        executor.submit(scheduler.plan().plan)
        scheduler.abandon()
    assert len(executor.between_s) == 2, "no result was read between the last two"


def test_every_token_and_draft_is_the_one_that_was_asked_for() -> None:
    scheduler, results = Scheduler(LIMITS), MadeUpResults(LIMITS, acceptance=1.0, token_id=7)
    scheduler.add(make_request("r", range(10)))
    for num_accepted in (0, 5):
        step = scheduler.plan()
        result = results.of(step.plan)
        assert (result.emitted_tokens == 7).all() and (result.draft_tokens == 7).all()
        assert result.num_accepted.tolist() == [num_accepted]
        assert (result.emitted_tokens.shape, result.draft_tokens.shape) == ((1, 6), (1, 5))
        scheduler.commit(step, result)
    assert np.array_equal(results._context_lens, [16, 0, 0, 0])
