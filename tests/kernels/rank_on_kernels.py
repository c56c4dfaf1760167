"""One rank of two that runs the GPU's ops on a CPU. As a program, rank 1: ENGINE STORE."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of, request_results
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import StateCopies
from dflash_trt.engine_dir import EngineDir
from tests.executor.rank_engines import KV_CACHE_BYTES, skipping
from tests.kernels_on import set_up_kernels
from tests.traces import GREEDY, PROMPTS, Steps, trace

REQUESTS: dict[str, Any] = {"samplings": GREEDY[:1], "num_draft_tokens": (3,), "num_new": 2, "chunk": 7}


def run_rank(rank: int, engine: Path, store: Path) -> tuple[Steps, torch.Tensor]:
    """A trace, and of a hybrid a prefix hit; then the logits of a prompt when rank 0 ignores what came of the first
    exchange.
    """
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = ProcessRanks.join(store, rank=rank, num_ranks=2, device=cpu, timeout_s=300.0)
    executor = TorchGpuExecutor.open(
        EngineDir.open(engine), RuntimeConfig(kv_cache_bytes=KV_CACHE_BYTES), rank=rank, ranks=ranks, device=cpu
    )
    steps = trace(executor, **REQUESTS)[0] + prefix_hit(executor)
    with skipping(executor, 0) if rank == 0 else nullcontext():
        return steps, executor.target_logits(PROMPTS[0])


def prefix_hit(executor: Any) -> Steps:
    """A prompt behind the state of its first page, before and after its slot had another one; none without states."""
    if not executor.limits.num_snapshots:
        return []
    first = ScheduledRequest(
        request_id="first",
        token_ids=(5, 9, 2, 3),
        context_len=0,
        num_candidates=0,
        page_ids=(0, 1),
        sampling=StepSampling(),
    )
    rest = replace(first, token_ids=(7, 1), context_len=4)
    copies = StateCopies(np.array([0]), np.array([1]))
    plans = [plan_of(StepBatch(requests=(request,), num_draft_tokens=0)) for request in (first, rest)]
    other = plan_of(StepBatch(requests=(replace(first, token_ids=(6,) * 4, page_ids=(2, 3)),), num_draft_tokens=0))
    order = (replace(plans[0], saves=copies), plans[1], other, replace(plans[1], restores=copies))
    found = [request_results(executor.submit(plan).result()) for plan in order]
    assert found[1] == found[3]
    return found


if __name__ == "__main__":
    set_up_kernels()
    run_rank(1, *map(Path, sys.argv[1:]))
