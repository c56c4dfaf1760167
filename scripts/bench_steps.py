"""CPU time of an engine's steps on a CPU, with the CPU kernels and with PyTorch alone: a table of docs/benchmarks.md.

    OMP_NUM_THREADS=1 python -m scripts.bench_steps ENGINE_DIR [NUM_ROUNDS]

Sides and steps take turns within a round; medians over rounds.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.backends.torch.native.library import NoKernels
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir

CONTEXT_LEN = 200
# name: whether the drafter is there, tokens of the step, tokens before it; None: a verify block
STEPS: dict[str, tuple[bool, int | None, int]] = {
    "plain step": (False, 1, CONTEXT_LEN),
    "verify step": (True, None, CONTEXT_LEN),
    "prefill of 200 tokens": (True, 200, 0),
    "of 1000": (True, 1000, 0),
}


def opened(engine: EngineDir, *, has_kernels: bool, use_drafter: bool) -> TorchExecutor:
    config = RuntimeConfig(device="cpu", num_threads=1, use_drafter=use_drafter, kv_cache_bytes=1 << 28)
    if has_kernels:
        return TorchExecutor.open(engine, config)
    with patch("dflash_trt.backends.torch.executor.cpu_kernels", return_value=NoKernels("left out")):
        return TorchExecutor.open(engine, config)


def step_of(executor: TorchExecutor, num_tokens: int | None, context_len: int) -> Callable[[], float]:
    """A step of one request, which gives its CPU time in milliseconds."""
    limits = executor.limits
    width = limits.max_draft_len + 1
    num_drafts = limits.max_draft_len if executor.network.draft is not None else 0
    tokens = tuple(3 * i % executor.network.target.vocab_size for i in range(num_tokens or width))
    request = ScheduledRequest(
        request_id="one",
        token_ids=tokens,
        context_len=context_len,
        num_candidates=num_drafts if num_tokens is None else 0,
        page_ids=tuple(range(-(-(context_len + len(tokens)) // limits.page_size))),
        sampling=StepSampling(),
    )
    plan = plan_of(StepBatch(requests=(request,), num_draft_tokens=num_drafts))

    def run() -> float:
        started_s = time.process_time()
        executor.submit(plan).result()
        return 1e3 * (time.process_time() - started_s)

    return run


def main() -> None:
    engine, num_rounds = EngineDir.open(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    sides = {"PyTorch": False, "CPU kernels": True}
    executors = {
        (name, use_drafter): opened(engine, has_kernels=has_kernels, use_drafter=use_drafter)
        for name, has_kernels in sides.items()
        for use_drafter in (False, True)
    }
    steps = {
        (name, step): step_of(executors[name, use_drafter], num_tokens, context_len)
        for step, (use_drafter, num_tokens, context_len) in STEPS.items()
        for name in sides
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for index in range(num_rounds + 1):  # the first round warms up
        for key, run in steps.items():
            taken_ms = run()
            if index:
                times[key].append(taken_ms)
    print(f"| | {' | '.join(STEPS)} |\n|---|{'---:|' * len(STEPS)}")
    for name in sides:
        print(f"| {name} | {' | '.join(f'{median(times[name, step]):.1f} ms' for step in STEPS)} |")


if __name__ == "__main__":
    main()
