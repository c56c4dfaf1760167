"""One rank of two that runs the GPU's ops under Triton's interpreter. As a program, rank 1: ENGINE STORE [MEMORY].

MEMORY is a file that the ranks share, through which their sums go.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import KV_CACHE_BYTES, skipping
from tests.kernels.peers_on_cpu import map_peers
from tests.traces import GREEDY, PROMPTS, Steps, trace

REQUESTS: dict[str, Any] = {"samplings": GREEDY[:1], "num_draft_tokens": (3,), "num_new": 2, "chunk": 7}


def run_rank(rank: int, engine: Path, store: Path, memory: Path | None = None) -> tuple[Steps, torch.Tensor]:
    """A trace, then the logits of a prompt when rank 0 ignores what came of the first exchange."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=2, device=cpu, timeout_s=300.0)
    executor = TorchGpuExecutor.open(
        EngineDir.open(engine), RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES), rank=rank, ranks=ranks, device=cpu
    )
    if memory is not None:
        hidden_size = executor.network.target.hidden_size
        executor._resources = replace(executor._resources, peers=map_peers(memory, rank, 2, hidden_size=hidden_size))
    steps, _ = trace(executor, **REQUESTS)
    with skipping(executor, 0) if rank == 0 else nullcontext():
        return steps, executor.target_logits(PROMPTS[0])


if __name__ == "__main__":
    run_rank(1, *map(Path, sys.argv[1:]))
