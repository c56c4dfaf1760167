"""How long ranks with requests of their own wait for each other, on CPUs: a step against its slowest rank.

OMP_NUM_THREADS=1 PYTHONPATH=. python scripts/rank_waits.py

Two ranks over gloo, a thread each, run a random target with experts. In turn rank 0 or rank 1 has most requests. Rank 0
measures its steps and, within them, its exchanges; where it is the slowest, these are the exchange alone.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

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
    return 0


if __name__ == "__main__":
    sys.exit(main())
