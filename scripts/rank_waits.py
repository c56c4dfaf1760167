"""How long ranks with requests of their own wait for each other, on CPUs: a step against its slowest rank.

OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/rank_waits.py

Two ranks over gloo, a thread each, run a random target with experts. In turn rank 0 or rank 1 has most requests. Rank 0
measures its steps and, within them, its exchanges; where it is the slowest, these are the exchange alone. Then the
collectives of few values and of many, and a head divided among the ranks against one that is whole on each.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.compile.build import build_engine
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.executor.opening import open_executor
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from tests.factories import make_target

_MANY: Final = 24
_FEW: Final = 2
_NUM_STEPS: Final = 60
_NUM_CALLS: Final = 21
_VOCAB_SIZE: Final = 16384
_SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_hidden_layers": 6,
}


class Exchanges:
    """Seconds of this rank's exchanges since the last `take`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def timed(self, ranks: ProcessRanks, *arguments: Any) -> None:
        began_s = time.perf_counter()
        _EXCHANGE(ranks, *arguments)
        self._seconds += time.perf_counter() - began_s

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


_EXCHANGE: Final = ProcessRanks._exchange


def measured(executor: Any, exchanges: Exchanges, counts: tuple[int, int]) -> tuple[float, float]:
    """Median milliseconds of a step and of rank 0's exchanges in it, where the ranks have so many requests."""
    scheduler = DataParallelScheduler(executor.limits, num_ranks=2)
    for rank, count in zip(scheduler.ranks, counts, strict=True):
        for index in range(count):
            sampling = SamplingParams(max_new_tokens=_NUM_STEPS + 8)
            rank.add(Request(request_id=str(index), prompt_token_ids=(1, 2, 3), sampling=sampling))
    steps = []
    for _ in range(_NUM_STEPS):
        step = scheduler.plan()
        exchanges.take()
        began_s = time.perf_counter()
        result = executor.submit(step.plan).result()
        steps.append((1e3 * (time.perf_counter() - began_s), 1e3 * exchanges.take()))
        scheduler.commit(step, result)
    whole, waited = zip(*steps[4:], strict=True)
    return statistics.median(whole), statistics.median(waited)


def _median_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(_NUM_CALLS):
        began_s = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times)


def _collectives(ranks: ProcessRanks, num_rows: int, width: int) -> str:
    x, both, each = torch.randn(num_rows, width), torch.randn(2 * num_rows, width), [num_rows] * 2
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: ranks.all_gather_rows(x, each),
        "sum": lambda: ranks.reduce_scatter_rows(both.clone(), each),
        "send": lambda: ranks.all_to_all_by_counts(both, each, each),
    }
    times = ", ".join(f"{name} {_median_ms(call):.2f} ms" for name, call in calls.items())
    return f"{num_rows} x {width} values of each rank: {times}"


def _heads(ranks: ProcessRanks, num_rows: int) -> str:
    hidden_size, each = int(_SIZES["hidden_size"]), [num_rows] * 2
    x, head = torch.randn(num_rows, hidden_size), torch.randn(_VOCAB_SIZE, hidden_size)
    part = head[: _VOCAB_SIZE // 2].clone()
    whole_ms = _median_ms(lambda: x @ head.T)
    divided_ms = _median_ms(lambda: ranks.all_to_all_rows(ranks.all_gather_rows(x, each) @ part.T, each))
    return f"head of {num_rows} rows a rank: whole {whole_ms:.2f} ms, divided {divided_ms:.2f} ms"


def _alone(rank: int, store: Path) -> list[str]:
    """A rank's measurements outside an engine; the other one does the same."""
    torch.set_num_threads(1)
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=2, device=torch.device("cpu"), timeout_s=300.0)
    lines = [_collectives(ranks, 1, 8), _collectives(ranks, 512, 2048), _heads(ranks, 8), _heads(ranks, 64)]
    ranks.smallest(0)
    ranks.close()
    return lines


def print_alone(directory: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        first, _ = pool.map(_alone, range(2), [directory / "store"] * 2)
    print("\n".join(first))


def main() -> int:
    exchanges = Exchanges()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_target(root / "target", family="qwen3_moe", tokenizer=False, **_SIZES)
        sizes: Any = {"max_batch_size": 32, "max_seq_len": 128, "tp_size": 2, "ep_size": 2}
        config = BuildConfig(target="target", dtype="float32", attention_dp=True, **sizes)
        engine = build_engine(
            config, root / "engine", base_dir=root, overwrite=False, command=(), progress=lambda _: None
        )

        def timed_exchange(ranks: ProcessRanks, *arguments: Any) -> None:  # a function, for it is a method then
            exchanges.timed(ranks, *arguments)

        with patch.object(ProcessRanks, "_exchange", timed_exchange):
            executor = open_executor(engine, RuntimeConfig(device="cpu", num_threads=1, kv_cache_bytes=1 << 27))
            try:
                for counts in 2 * ((_MANY, _FEW), (_FEW, _MANY), (_MANY, _MANY), (_FEW, _FEW)):
                    whole, waited = measured(executor, exchanges, counts)
                    print(f"{counts[0]:2d} and {counts[1]:2d} requests: {whole:6.2f} ms, exchanges {waited:5.2f} ms")
            finally:
                executor.close()
        print_alone(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
