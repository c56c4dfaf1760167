#!/usr/bin/env python3
"""Cold starts of one engine on this CPU: K by policy against decoding without its drafter.

    python -m scripts.cold_start ENGINE PROMPTS.jsonl [--rounds 9] [--tokens 64] [--requests 1,2,4,8,16]

N prompts at once, with a policy that knows nothing yet: as `dflash-trt run` has them. One thread, and times are CPU
times of that thread. Sides take turns, every other round backwards; speeds are medians of the rounds, ratios medians
of the rounds' own.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from dflash_trt.core.draft_lengths import usual_draft_lengths
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import max_draft_len, open_executor
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy, FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.simulation.load import RequestLoad, drive
from scripts.simulation_check import load_of

_NONE, _DEFAULT = "no drafter", "default"
_MAX_BATCH_SIZE = 64


def sides(most: int) -> dict[str, Callable[[], DraftLengthPolicy]]:
    lengths = sorted({0, 2, 4, most})
    fixed = {f"K = {length}": lambda length=length: FixedDraftLength(length) for length in lengths}  # type: ignore[misc]
    usual = usual_draft_lengths(most, _MAX_BATCH_SIZE, "cpu")
    chosen = {_DEFAULT: lambda: BatchSizeDraftLength(usual), "adaptive": lambda: AdaptiveDraftLength(most)}
    return {_NONE: lambda: FixedDraftLength(0), **fixed, **chosen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", default="1,2,4,8,16")
    words = parser.parse_args()
    torch.set_num_threads(1)
    engine = EngineDir.open(words.engine)
    config = RuntimeConfig(num_threads=1, device="cpu", kv_cache_bytes=2 << 30)
    executors = {has: open_executor(engine, config.replaced(use_drafter=has)) for has in (False, True)}
    policies = sides(max_draft_len(engine))

    def speed(name: str, load: RequestLoad) -> float:
        executor = executors[name != _NONE]
        scheduler = Scheduler(executor.limits, SchedulerConfig(enable_prefix_caching=False), policies[name]())
        with closing(EngineLoop(executor, scheduler, clock=time.thread_time)) as loop:
            outputs, seconds = drive(loop, load, clock=time.thread_time)
        return sum(len(output.token_ids) for output in outputs) / seconds

    names = list(policies)
    fixed = [name for name in names if name.startswith("K")]
    print(f"| requests | {' | '.join(names)} | {fixed[-1]} / none | default / none | default / best fixed |")
    print(f"|{'---:|' * (len(names) + 4)}")
    for count in map(int, words.requests.split(",")):
        load = load_of(engine, words.prompts, count, words.tokens)
        load = RequestLoad(requests=load.requests[:count], concurrency=count)
        for name in names:
            speed(name, load)  # warm
        rounds = [
            {name: speed(name, load) for name in names[:: -1 if index % 2 else 1]} for index in range(words.rounds)
        ]
        middle = {name: statistics.median(found[name] for found in rounds) for name in names}
        best = max(fixed, key=lambda name: middle[name])
        pairs = ((fixed[-1], _NONE), (_DEFAULT, _NONE), (_DEFAULT, best))
        ratios = [statistics.median(found[a] / found[b] for found in rounds) for a, b in pairs]
        cells = [f"{middle[name]:.0f}" for name in names] + [f"{ratio:.2f}" for ratio in ratios]
        print(f"| {count} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
