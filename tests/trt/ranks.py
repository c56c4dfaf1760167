"""Interpreted networks of several ranks in threads of one process, which meet at every collective."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dflash_trt.core.config import CollectiveMode
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.step_plan import FinishedStep, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.ranks.shard import fingerprint
from tests.trt.interpreter import NetworkInterpreter, Plugins, RunNode, Step
from tests.trt.networks import DefinedStep, InterpretedExecutor, define_engine, define_pair
from tests.trt.plugin_reference import PluginReference

T = TypeVar("T")


class RankThreads:
    """One thread per rank. At a collective each leaves its tensor and waits for the others'."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60)
        self._tensors: list[Tensor | None] = [None] * num_ranks
        self._threads = ThreadPoolExecutor(num_ranks)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(rank)` of all ranks at once."""
        return list(self._threads.map(work, range(self.num_ranks)))

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """The tensors that the ranks bring to this exchange, in their order."""
        self._tensors[rank] = tensor
        self._barrier.wait()
        found = [tensor for tensor in self._tensors if tensor is not None]
        self._barrier.wait()  # nobody brings the next one before all have these
        assert len({(x.shape, x.dtype) for x in found}) == 1, "ranks that exchange different things"
        return found

    def interpreter(self, rank: int, trt: Any, network: Any, constants: Mapping[str, Tensor]) -> NetworkInterpreter:
        return _RankInterpreter(self, rank, trt, network, constants)


class _RankInterpreter(NetworkInterpreter):
    """An all-gather stacks the ranks' tensors along axis 0, an all-reduce adds them, as TensorRT says.

    The others divide axis 0 among the ranks.
    """

    def __init__(
        self,
        threads: RankThreads,
        rank: int,
        trt: Any,
        network: Any,
        constants: Mapping[str, Tensor],
        plugins: Plugins | None = None,
    ) -> None:
        self._threads, self._rank = threads, rank
        super().__init__(trt, network, constants, plugins)

    def _dist_collective(self, layer: Any) -> Step:
        assert layer.num_ranks == self._threads.num_ranks
        kind = layer.name.split()[0]  # a finished layer tells what it does by its name alone
        combine = {
            "ALL_REDUCE": lambda found: torch.stack(found).sum(0),
            "ALL_GATHER": torch.cat,
            "REDUCE_SCATTER": lambda found: torch.stack(self._own(found)).sum(0),
            "ALL_TO_ALL": lambda found: torch.cat(self._own(found)),
        }[kind]

        def exchange(given: list[Tensor]) -> list[Tensor]:
            return [combine(self._threads.exchange(self._rank, given[0]))]

        return exchange

    def _own(self, found: list[Tensor]) -> list[Tensor]:
        """This rank's part of each rank's tensor."""
        size, rest = divmod(len(found[0]), self._threads.num_ranks)
        assert rest == 0, "rows that the ranks do not share evenly"
        return [tensor[self._rank * size : (self._rank + 1) * size] for tensor in found]


@dataclass(kw_only=True)
class RankStep(DefinedStep):
    """The network of one rank, whose collectives wait for the other ranks' threads."""

    threads: RankThreads
    rank: int

    def interpreter(self, run_node: RunNode | None = None) -> NetworkInterpreter:
        plugins = self.nodes, run_node or _CollectiveNodes(self.threads, self.rank)
        return _RankInterpreter(self.threads, self.rank, self.trt, self.network, self.constants, plugins)


class InterpretedRanks:
    """Implements `core.batch.StepExecutor`: all ranks run each step, and their results must be the same."""

    def __init__(self, threads: RankThreads, ranks: Sequence[InterpretedExecutor]) -> None:
        self.ranks = ranks
        self.limits = ranks[0].limits
        self._threads = threads

    def submit(self, plan: StepPlan) -> FinishedStep:
        def run() -> StepResult:
            results = self._threads.run(lambda rank: self.ranks[rank].submit(plan).result())
            assert len({fingerprint(result) for result in results}) == 1, "ranks that give different results"
            return results[0]

        return FinishedStep(run)


def interpreted_ranks(
    trt: Any,
    target: Path,
    drafter: Path | None,
    *,
    num_ranks: int,
    num_pages: int,
    collectives: CollectiveMode = "native",
    split_length: int = 0,
) -> InterpretedRanks:
    """The networks of all ranks of a pair, interpreted."""
    threads = RankThreads(num_ranks)
    executors = []
    for rank in range(num_ranks):
        mapping = RankMapping(world_size=num_ranks, tp_size=num_ranks, rank=rank)
        options = {"collectives": collectives, "split_length": split_length}
        defined = define_pair(trt, target, drafter, mapping=mapping, **options)
        step = RankStep(**vars(defined), threads=threads, rank=rank)
        executors.append(InterpretedExecutor(step, num_pages=num_pages))
    return InterpretedRanks(threads, executors)


def interpreted_engine(trt: Any, engine: EngineDir, **sizes: int) -> InterpretedRanks:
    """All ranks of an engine directory of the torch backend, as TensorRT networks.

    `sizes` are those of InterpretedExecutor.
    """
    num_ranks = engine.manifest.pretrained_config.mapping.world_size
    threads = RankThreads(num_ranks)
    executors = [
        InterpretedExecutor(
            RankStep(**vars(define_engine(trt, engine, rank=rank)), threads=threads, rank=rank), **sizes
        )
        for rank in range(num_ranks)
    ]
    return InterpretedRanks(threads, executors)


class _CollectiveNodes(PluginReference):
    """The nodes of plugins/README.md, those of collectives among threads."""

    def __init__(self, threads: RankThreads, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads, self._rank = threads, rank

    def _all_reduce(self, x: dict[str, Tensor], settings: dict[str, int]) -> list[Tensor]:
        return [torch.stack(self._exchanged(x, settings)).sum(0)]

    def _all_gather(self, x: dict[str, Tensor], settings: dict[str, int]) -> list[Tensor]:
        return [torch.cat(self._exchanged(x, settings))]

    def _reduce_scatter(self, x: dict[str, Tensor], settings: dict[str, int]) -> list[Tensor]:
        return [torch.stack([parts[self._rank] for parts in self._exchanged(x, settings)]).sum(0)]

    def _all_to_all(self, x: dict[str, Tensor], settings: dict[str, int]) -> list[Tensor]:
        return [torch.stack([parts[self._rank] for parts in self._exchanged(x, settings)])]

    def _exchanged(self, x: dict[str, Tensor], settings: dict[str, int]) -> list[Tensor]:
        assert settings == {"num_ranks": self._threads.num_ranks}
        return self._threads.exchange(self._rank, x["x"])
