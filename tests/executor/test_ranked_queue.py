"""Steps that several ranks queue, as on GPUs: a worker's own loop behind its pipe, and devices that a test finishes."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_trt.core.errors import RankError
from dflash_trt.core.step_plan import StepHandle, StepPlan, StepResult
from dflash_trt.executor.idle import IdleExecutor
from dflash_trt.executor.ranks import launcher, worker
from dflash_trt.executor.ranks.executor import RankedExecutor
from dflash_trt.executor.ranks.launcher import RankWorkers
from dflash_trt.executor.ranks.messages import Awake, Opened, OpenShard, RankConnection, RankGoneError, RankProcess
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.scheduler import Scheduler
from tests.scheduler.driver import make_limits, make_request

LIMITS = make_limits()
WAIT_S = 10.0


class Device(IdleExecutor):
    """Takes steps at once, and has a result when `finish` was called for it."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.plans: list[StepPlan] = []
        self.changes: dict[int, Callable[[StepResult], StepResult]] = {}  # by the number of the step
        self.refused: int | None = None
        self._finished = threading.Semaphore(0)

    def submit(self, plan: StepPlan) -> Any:
        number = len(self.plans)
        if number == self.refused:
            raise ZeroDivisionError(f"step {number}")
        self.plans.append(plan)
        result = super().submit(plan).result()

        def read() -> StepResult:
            assert self._finished.acquire(timeout=WAIT_S)
            return self.changes.get(number, lambda same: same)(result)

        return SimpleNamespace(result=read, elapsed_s=0.25)

    def finish(self, num_steps: int = 1) -> None:
        self._finished.release(num_steps)

    def close(self) -> None:
        """Nothing is held."""


class WorkerThread(RankProcess):
    """A worker of this process."""

    process_id, is_stopped = 0, False

    def __init__(self, rank: int) -> None:
        pipe, theirs = Pipe()
        RankConnection.__init__(self, rank, pipe)
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def _serve(self, pipe: Any) -> None:
        with pipe, contextlib.suppress(EOFError, OSError):  # rank 0 killed it
            worker._serve(pipe)

    def kill(self, reason: str | None = None) -> None:
        self._pipe.close()

    def _ending(self, error: Exception) -> RankGoneError:
        return RankGoneError("killed")

    def end(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        self._pipe.close()


class Ranks:
    """Two ranks on devices with a queue, the worker's behind its pipe, and a scheduler with a request."""

    def __init__(self, devices: tuple[Device, Device]) -> None:
        self.devices = devices
        workers = RankWorkers()
        options: Any = SimpleNamespace(num_local_ranks=2, has_own_requests=False, config=SimpleNamespace(device="cpu"))
        workers.start(OpenShard(engine_dir="", rank=1, options=options))
        assert [workers.receive(WAIT_S) for _ in range(2)] == [[Awake()], [Opened()]]
        workers.at_end.append(devices[0].close)
        group: Any = SimpleNamespace(device=torch.device("cuda"), num_calls=0)
        local: Any = devices[0]
        self.executor = RankedExecutor(local, group, workers, num_threads=torch.get_num_threads())
        self.handles: deque[tuple[PlannedStep, StepHandle]] = deque()
        self._scheduler = Scheduler(LIMITS)
        self._scheduler.add(make_request("r", max_new_tokens=60))

    def submit(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            step = self._scheduler.plan()
            self.handles.append((step, self.executor.submit(step.plan)))

    def read(self, num_steps: int = 1) -> list[StepResult]:
        """Of the steps that were submitted first."""
        results = []
        for _ in range(num_steps):
            step, handle = self.handles[0]
            results.append(handle.result())
            self._scheduler.settle(step, results[-1])
            self.handles.popleft()
        return results

    def finish(self, num_steps: int = 1) -> None:
        for device in self.devices:
            device.finish(num_steps)

    def plans_of_worker(self, count: int) -> list[StepPlan]:
        """When there are so many."""
        plans, end_s = self.devices[1].plans, time.monotonic() + WAIT_S
        while len(plans) < count:
            assert time.monotonic() < end_s, f"{len(plans)} of {count} steps"
            time.sleep(0.001)
        return plans


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    def exit_thread(code: int) -> None:
        raise SystemExit(code)

    devices = (Device(), Device())
    monkeypatch.setattr(launcher, "RankProcess", WorkerThread)
    monkeypatch.setattr(worker, "join", lambda options, rank, address: SimpleNamespace(num_calls=0))
    monkeypatch.setattr(OpenShard, "open", lambda order, group: devices[1])
    monkeypatch.setattr(worker, "FAILED_ALONE_S", 0.1)
    monkeypatch.setattr(worker.os, "_exit", exit_thread)
    made = Ranks(devices)
    yield made
    made.finish(9)
    made.executor.close()


def test_a_step_is_queued_on_every_rank_while_the_one_before_runs(ranks: Ranks) -> None:
    ranks.submit(2)
    assert len(ranks.plans_of_worker(2)) == len(ranks.devices[0].plans) == 2
    ranks.devices[0].finish()
    first = ranks.handles[0][1]
    assert ranks.read()[0].num_accepted.tolist() == [0] and first.elapsed_s == 0.25
    ranks.submit()
    time.sleep(0.1)
    assert len(ranks.devices[1].plans) == 2, "its own first result is not read, whose memory the third would take"
    ranks.devices[1].finish()
    ranks.plans_of_worker(3)
    ranks.finish(2)
    assert [result.emitted_tokens.shape for result in ranks.read(2)] == [(1, 6)] * 2


def test_rows_that_repeat_are_sent_once_and_are_one_object_for_the_worker(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = ranks.executor._workers.send

    def spy(order: Any) -> None:
        sent.append(order)
        send(order)

    monkeypatch.setattr(ranks.executor._workers, "send", spy)
    ranks.finish(6)
    for _ in range(6):
        ranks.submit()
        ranks.read()
    ours, theirs = ranks.devices[0].plans, ranks.plans_of_worker(6)
    repeats = [after.rows is before.rows for before, after in pairwise(ours)]
    assert any(repeats) and not all(repeats)
    assert [order.repeats_rows for order in sent] == [False, *repeats]
    assert [after.rows is before.rows for before, after in pairwise(theirs)] == repeats
    for our, their in zip(ours, theirs, strict=True):
        assert their.rows.request_ids == our.rows.request_ids == ("r",)
        assert (their.rows.token_ids.tolist(), their.num_pages) == (our.rows.token_ids.tolist(), our.num_pages)
        assert their.page_updates.page_ids.tolist() == our.page_updates.page_ids.tolist()


def test_another_outcome_is_told_one_step_late_and_from_then_on(ranks: Ranks) -> None:
    ranks.devices[1].changes[1] = lambda result: replace(result, next_context_lens=result.next_context_lens + 1)
    ranks.finish(4)
    ranks.submit(2)
    ranks.read(2)
    ranks.submit(2)
    for _, handle in ranks.handles:
        with pytest.raises(RankError, match="2 ranks: expected the same tokens"):
            handle.result()
    assert not ranks.executor.can_retry
    with pytest.raises(RankError, match="expected the same tokens"):
        ranks.executor.submit(ranks.devices[0].plans[0])


def test_a_worker_that_fails_alone_runs_nothing_more_and_is_named(ranks: Ranks) -> None:
    ranks.devices[1].refused = 1
    ranks.finish(4)
    ranks.submit(2)
    ranks.read()
    ranks.submit()
    ranks.read()
    with pytest.raises(RankError, match="rank 1 of 2 failed: ZeroDivisionError: step 1"):
        ranks.read()
    assert len(ranks.devices[1].plans) == 1


def test_so_is_one_that_cannot_read_an_outcome(ranks: Ranks) -> None:
    def fail(result: StepResult) -> StepResult:
        raise ZeroDivisionError("broken memory")

    ranks.devices[1].changes[0] = fail
    ranks.finish(4)
    ranks.submit(2)
    ranks.read()
    with pytest.raises(RankError, match="rank 1 of 2 failed: ZeroDivisionError: broken memory"):
        ranks.read()


def test_this_rank_is_named_when_it_fails_alone_whatever_is_on_its_way(ranks: Ranks) -> None:
    ranks.devices[0].refused = 2
    ranks.finish(4)
    ranks.submit(2)
    ranks.read(2)
    with pytest.raises(RankError, match="rank 0 of 2 failed: ZeroDivisionError: step 2"):
        ranks.submit()


def test_a_worker_that_failed_before_this_rank_is_named(ranks: Ranks) -> None:
    ranks.devices[1].refused, ranks.devices[0].refused = 1, 2
    ranks.finish(4)
    ranks.submit(2)
    ranks.read()
    with pytest.raises(RankError, match="rank 1 of 2 failed: ZeroDivisionError: step 1"):
        ranks.submit()


def test_the_end_waits_for_what_is_queued(ranks: Ranks) -> None:
    ranks.submit()
    ranks.plans_of_worker(1)
    threading.Timer(0.2, ranks.devices[1].finish).start()
    ranks.executor.close()
    assert not ranks.devices[1]._finished.acquire(blocking=False), "the worker read its outcome first"
