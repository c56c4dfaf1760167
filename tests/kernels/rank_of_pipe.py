"""One rank of two with requests of its own, on the GPU's ops on a CPU. As a program, rank 1: ENGINE STORE.

It reads plans from its standard input, and writes results to its standard output.
"""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import FinishedStep, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import KV_CACHE_BYTES
from tests.kernels_on import set_up_kernels


def open_rank(rank: int, engine: Path, store: Path, **options: Any) -> TorchGpuExecutor:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=2, device=cpu, timeout_s=300.0)
    config = RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES, **options)
    return TorchGpuExecutor.open(EngineDir.open(engine), config, rank=rank, ranks=ranks, device=cpu)


class TwoRanks:
    """Implements StepExecutor: rank 0 here, and rank 1 in a process."""

    has_queue = False
    can_retry = False

    def __init__(self, engine: Path, store: Path) -> None:
        words = [sys.executable, "-m", "tests.kernels.rank_of_pipe", str(engine), str(store)]
        root = Path(__file__).parents[2]
        self._other = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._own = open_rank(0, engine, store)
        self.limits = self._own.limits

    def submit(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(lambda: self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        assert self._other.stdin is not None and self._other.stdout is not None
        [other] = plan.others
        pickle.dump(other, self._other.stdin)
        self._other.stdin.flush()
        own = self._own.submit(replace(plan, others=())).result()
        return replace(own, others=(pickle.load(self._other.stdout),))

    def close(self) -> None:
        self._other.kill()
        with self._other:  # closes the pipes, and waits
            pass


def main(engine: Path, store: Path) -> None:
    results, sys.stdout = sys.stdout.buffer, sys.stderr
    set_up_kernels()
    executor = open_rank(1, engine, store)
    while True:
        pickle.dump(executor.submit(pickle.load(sys.stdin.buffer)).result(), results)
        results.flush()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
