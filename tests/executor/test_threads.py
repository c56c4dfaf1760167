"""Threads in which an executor is opened and its steps run."""

import threading
import time
from typing import Any

import pytest

from dflash_trt.core.step_plan import FinishedStep, StepPlan, StepSkippedError
from dflash_trt.executor import threads
from dflash_trt.executor.stream import StepStream
from dflash_trt.executor.threads import keep_waits_short, run_in_thread
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_driver, make_limits, make_request


def test_a_function_in_a_thread_gives_its_result_or_its_error() -> None:
    thread = run_in_thread(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive(), "its team of threads ends with it"

    def failing() -> None:
        raise KeyboardInterrupt("in it")

    with pytest.raises(KeyboardInterrupt, match="in it"):
        run_in_thread(failing)


@pytest.mark.parametrize(
    ("calls", "is_chosen", "num_teams"),
    [([1], False, 0), ([2], True, 0), ([2, 2], False, 1), ([1, None], False, 1)],
    ids=["one thread", "chosen", "once", "default"],
)
def test_a_team_of_threads_is_kept_idle_where_waits_are_long(
    monkeypatch: pytest.MonkeyPatch, calls: list[int | None], is_chosen: bool, num_teams: int
) -> None:
    def count() -> int:
        return sum(thread.name == "dflash-idle-team" for thread in threading.enumerate())

    monkeypatch.setattr(threads, "is_waiting_chosen", lambda: is_chosen)
    monkeypatch.setattr(threads, "_has_idle_team", False)
    before = count()
    for num_threads in calls:
        keep_waits_short(num_threads)
    assert count() - before == num_teams


class Slow(FakeExecutor):
    """Notes its calls; steps of `fails` raise."""

    def __init__(self, **options: Any) -> None:
        super().__init__(make_limits(), **options)
        self.started: list[tuple[StepPlan, int]] = []
        self.fails: list[StepPlan] = []
        self.goes_on = threading.Event()

    def submit(self, plan: StepPlan) -> FinishedStep:
        self.started.append((plan, threading.get_ident()))
        assert self.goes_on.wait(10)
        if plan in self.fails:
            raise ValueError("this step")
        return super().submit(plan)


def plans(count: int) -> list[StepPlan]:
    """The first steps of a request, each of which may run by itself."""
    driver = make_driver()
    driver.add(make_request("r", range(count), max_new_tokens=2))
    step = driver.scheduler.plan()
    return [step.plan, *(step.plan.part(slice(0, 1)) for _ in range(count - 1))]


def test_steps_run_one_after_another_in_a_thread_of_their_own() -> None:
    executor, (first, second, _) = Slow(), plans(3)
    stream = StepStream(executor)
    assert stream.has_queue and stream.can_retry and stream.limits is executor.limits
    steps = [stream.submit(first), stream.submit(second)]
    time.sleep(0.1)
    assert [plan for plan, _ in executor.started] == [first], "the second one waits for the first"
    executor.goes_on.set()
    results = [step.result() for step in steps]
    assert [plan for plan, _ in executor.started] == [first, second]
    assert {ident for _, ident in executor.started} != {threading.get_ident()}
    assert results[0].emitted_tokens.tolist() == results[1].emitted_tokens.tolist()
    assert all(step.elapsed_s > 0 for step in steps)
    stream.close()


def test_steps_behind_one_that_failed_are_skipped_until_the_stream_resumes() -> None:
    executor, (first, second, third) = Slow(), plans(3)
    executor.fails, stream = [first], StepStream(executor)
    executor.goes_on.set()
    failed, skipped = stream.submit(first), stream.submit(second)
    with pytest.raises(ValueError, match="this step"):
        failed.result()
    with pytest.raises(StepSkippedError):
        skipped.result()
    stream.resume()
    stream.submit(third).result()
    assert [plan for plan, _ in executor.started] == [first, third]
    stream.close()


def test_closing_waits_for_the_step_that_runs() -> None:
    executor, (first, *_) = Slow(), plans(1)
    stream = StepStream(executor)
    stream.submit(first)
    threading.Timer(0.2, executor.goes_on.set).start()
    stream.close()
    assert len(executor.batches) == 1
    with pytest.raises(RuntimeError):
        stream.submit(first)
