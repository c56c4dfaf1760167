"""Sides that share an executor, by a clock that the test moves: whose turn it is, and what a run counts."""

from typing import Any

import pytest

from dflash_trt.bench import lockstep
from dflash_trt.bench.lockstep import Lockstep, Work
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.step_plan import PageWindow, StepHandle, StepPlan
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.prompts import PromptReader
from tests.fake_executor import FakeExecutor, FakeRanks
from tests.scheduler.driver import make_limits
from tests.serving.engines import VOCAB_SIZE, Clock, make_executor

QUICK, SLOW = 0, 1
STEP_S = {QUICK: 1.0, SLOW: 3.0}
SUBMIT_S = 0.25
PROMPT = {"prompt_token_ids": list(range(5, 30))}  # several pages


class TimedExecutor:
    """A step takes its side's time; `steps` are (side, tokens) of each."""

    def __init__(self, executor: FakeExecutor, clock: Clock) -> None:
        self.limits = executor.limits
        self.steps: list[tuple[int, int]] = []
        self._executor = executor
        self._clock = clock

    has_queue, can_retry = False, True

    def submit(self, plan: StepPlan) -> StepHandle:
        side = int(plan.page_updates.page_ids[0]) // (self.limits.num_pages // 2)
        self.steps.append((side, plan.rows.total_tokens))
        self._clock.now += STEP_S[side]
        return self._executor.submit(plan)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What sides are timed by; a submitted request takes time, too."""
    clock, submit = Clock(), EngineLoop.submit

    def timed(self: EngineLoop, *arguments: Any) -> Any:
        clock.now += SUBMIT_S
        return submit(self, *arguments)

    monkeypatch.setattr(EngineLoop, "submit", timed)
    monkeypatch.setattr(lockstep.time, "perf_counter", clock)
    return clock


def sides_over(executor: Any) -> Lockstep:
    policies = {"quick": FixedDraftLength(0), "slow": FixedDraftLength(0)}
    return Lockstep(executor, policies, PromptReader(None, vocab_size=VOCAB_SIZE))


def work(**sampling: Any) -> list[Work]:
    return [Work(prompt=PROMPT, sampling=SamplingParams(max_new_tokens=6, **sampling))]


def test_the_side_that_has_used_the_least_time_steps_next(clock: Clock) -> None:
    executor = TimedExecutor(make_executor(), clock)
    sides_over(executor).run(work(ignore_eos=True), concurrency=1)
    turns = [side for side, _ in executor.steps]
    used_s = {QUICK: 0.0, SLOW: 0.0}
    for turn, num_left in zip(turns, range(len(turns), 0, -1), strict=True):
        is_quick_done = QUICK not in turns[-num_left:]
        assert turn == (SLOW if is_quick_done or used_s[SLOW] < used_s[QUICK] else QUICK)
        used_s[turn] += STEP_S[turn] + SUBMIT_S * (used_s[turn] == 0)


def test_a_second_run_costs_and_counts_what_the_first_did(clock: Clock) -> None:
    executor = TimedExecutor(make_executor(), clock)
    sides = sides_over(executor)
    first = sides.run(work(ignore_eos=True), concurrency=1)
    num_steps = len(executor.steps)
    assert sides.run(work(ignore_eos=True), concurrency=1) == first
    assert executor.steps[num_steps:] == executor.steps[:num_steps], "no prefix is reused"
    for side, report in enumerate(first.values()):
        num_own = sum(turn == side for turn, _ in executor.steps) // 2
        assert (report.num_output_tokens, report.elapsed_s) == (6, SUBMIT_S + STEP_S[side] * num_own)


def test_sides_keep_off_each_others_pages_of_windows() -> None:
    executor = make_executor(make_limits(num_pages=40, page_windows=(PageWindow(window=9, num_pages=30),)))
    sides_over(executor).run(work(ignore_eos=True), concurrency=1)
    rows = [row for batch in executor.batches for row in batch.requests]
    halves = [{page_id // 20 for page_id in row.page_ids} for row in rows]
    of_windows = [{page_id for pages in row.window_pages for page_id in pages.page_ids} for row in rows]
    first, second = (
        set().union(*(pages for pages, half in zip(of_windows, halves, strict=True) if half == {side}))
        for side in (0, 1)
    )
    assert first and max(first) < 15 and second == {15 + page_id for page_id in first}


def test_ranks_with_requests_of_their_own_know_each_others_rows_on_every_side() -> None:
    """FakeRanks compares what each rank expects of all with what there is."""
    ranks = FakeRanks([make_executor(make_limits(num_pages=40)) for _ in range(2)])
    policies = {"quick": FixedDraftLength(0), "slow": FixedDraftLength(3)}
    sides = Lockstep(ranks, policies, PromptReader(None, vocab_size=VOCAB_SIZE), num_ranks=2)
    reports = sides.run(work(ignore_eos=True) * 5, concurrency=4)
    assert [report.num_output_tokens for report in reports.values()] == [30, 30]
    for executor in ranks.executors:
        of_steps = [{page_id // 20 for row in batch.requests for page_id in row.page_ids} for batch in executor.batches]
        assert {half for halves in of_steps for half in halves} == {0, 1} and all(len(step) == 1 for step in of_steps)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_side_runs_as_many_requests_at_a_time_as_it_was_told(concurrency: int) -> None:
    executor = make_executor(make_limits(num_pages=80, max_num_tokens=99))
    sides_over(executor).run(work(ignore_eos=True) * 6, concurrency=concurrency)
    assert max(len(batch.requests) for batch in executor.batches) == concurrency


def test_requests_end_at_their_own_stop_tokens() -> None:
    reports = sides_over(make_executor()).run(work(stop_token_ids=tuple(range(VOCAB_SIZE))), concurrency=1)
    assert [report.num_output_tokens for report in reports.values()] == [1, 1]


def test_a_request_that_fails_is_no_measurement() -> None:
    with pytest.raises(AssertionError, match="RuntimeError"):
        sides_over(make_executor(fails_on=lambda batch: True)).run(work(), concurrency=1)


def test_closing_ends_every_sides_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[EngineLoop] = []

    def close(self: EngineLoop, **given: bool) -> None:
        ended.append(self)

    monkeypatch.setattr(EngineLoop, "close", close)
    sides_over(make_executor()).close()
    assert len(set(ended)) == 2
