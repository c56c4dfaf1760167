"""One rank of two on GPUs that serves beside foreign state. As a program, rank 1: NAME ENGINE STORE.

Every rank plans the same steps by itself, as all get the same tokens.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import KV_CACHE_BYTES
from tests.parity.test_foreign_state import NUM_SLOTS, SHARED, check_free_memory, check_mates

PROMPTS = [[*SHARED[:13], 8, 4], [7], SHARED[:13] + [3] * 3, [2, 9, 4], [*SHARED[:13], 8, 4, 4, 5]]
RULES = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.5}}
REQUESTS: dict[str, Any] = {"prompts": PROMPTS, "num_new": 6, "options": {3: RULES}}


def run_rank(rank: int, engine: Path, store: Path) -> None:
    """Raises AssertionError where a bit differs."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=2, device=device, timeout_s=300.0)
    opened, config = EngineDir.open(engine), RuntimeConfig(device="cuda", kv_cache_bytes=KV_CACHE_BYTES)
    executor = TorchGpuExecutor.open(opened, config, rank=rank, ranks=ranks)
    assert executor.limits.max_batch_size == NUM_SLOTS and executor.graphs.num_graphs > 0
    try:
        check_free_memory(executor, [torch.nan], overlaps=True, **REQUESTS)
        check_mates(executor, **REQUESTS)
    finally:
        executor.close()
        ranks.close()


if __name__ == "__main__":
    run_rank(1, *map(Path, sys.argv[1:]))
