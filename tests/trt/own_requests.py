"""Interpreted engines of ranks with requests of their own, in threads of one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tensorrt_rtx

from dflash_trt.backends.page_budget import PagePlan
from dflash_trt.backends.tensorrt.executor import TensorRTExecutor
from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import ExecutorLimits, StepHandle, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from tests.trt.engines import SPLIT_LENGTH, open_defined
from tests.trt.networks import define_engine
from tests.trt.ranks import RankStep, RankThreads


class RanksInThreads:
    """Implements EngineExecutor: each rank runs its own plan.

    It counts steps in which a rank has no rows, and those in which some have verify blocks alone and others prompts,
    and knows the most steps that were on their way at once.
    """

    has_queue, can_retry = True, False

    def __init__(self, threads: RankThreads, ranks: Sequence[TensorRTExecutor]) -> None:
        self.ranks, self.threads, self.num_idle, self.num_mixed = ranks, threads, 0, 0
        self.num_in_flight = self.most_in_flight = 0

    @property
    def limits(self) -> ExecutorLimits:
        return self.ranks[0].limits

    @property
    def page_plan(self) -> PagePlan:
        return self.ranks[0].page_plan

    def submit(self, plan: StepPlan) -> StepHandle:
        plans = (replace(plan, others=()), *plan.others)
        rows = [each.rows for each in plans if each.rows.num_requests]
        self.num_idle += 0 < len(rows) < len(plans)
        self.num_mixed += len({of_rank.is_decode for of_rank in rows}) > 1
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return _OfRanks(self, self.threads.run(lambda rank: self.ranks[rank].submit(plans[rank])))

    def place_bytes(self, place: int, is_state: bool) -> list[memoryview]:
        return [part for rank in self.ranks for part in rank.place_bytes(place, is_state)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class _OfRanks:
    """Implements StepHandle."""

    elapsed_s = 0.0

    def __init__(self, executor: RanksInThreads, handles: Sequence[StepHandle]) -> None:
        self._executor, self._handles = executor, handles

    def result(self) -> StepResult:
        self._executor.num_in_flight -= 1
        first, *others = (handle.result() for handle in self._handles)
        return replace(first, others=tuple(others))


def open_in_threads(
    engine: EngineDir, config: RuntimeConfig, *, collectives: CollectiveMode = "native", **_: Any
) -> RanksInThreads:
    """Executors of all ranks of an engine directory of the torch backend, as TensorRT networks."""
    num_ranks = engine.manifest.pretrained_config.mapping.world_size
    threads = RankThreads(num_ranks)
    options = {"split_length": SPLIT_LENGTH if config.deterministic else 0, "collectives": collectives}
    steps = [define_engine(tensorrt_rtx, engine, rank=rank, **options) for rank in range(num_ranks)]
    ranks = [RankStep(**vars(step), threads=threads, rank=rank) for rank, step in enumerate(steps)]
    return RanksInThreads(threads, [open_defined(rank, engine, config) for rank in ranks])


@contextmanager
def ranks_in_threads(**options: Any) -> Iterator[list[RanksInThreads]]:
    """Whoever opens an engine of several ranks gets `open_in_threads`. The list has what was opened."""
    opened: list[RanksInThreads] = []

    def open_ranks(*given: Any, **named: Any) -> RanksInThreads:
        opened.append(open_in_threads(*given, **named, **options))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_trt.executor.ranks.executor.open_ranks", open_ranks)
        yield opened
