#!/usr/bin/env python3
"""Simulated against measured speeds of an engine on this CPU: tok/s, tok/s per user and TTFT, by load and K.

    scripts/simulation_check.py ENGINE PROMPTS.jsonl [--rounds 3] [--tokens 64] [--concurrency 1,2,4,8,16]
        [--request-rate 4,8] [--shared-prefix 512] [--json FILE]

One thread computes everything, and all times are CPU times of that thread, so that other processes count no more than
by what they do to caches and clocks. These change speed by tens of percent within a minute where machines are shared,
so a fixed reference work (steps of a probe engine) is timed before and after every point and every measurement of the
machine: times of a point count in units of that reference.

Rounds alternate: the machine (as `dflash-trt bench machine`), the engine at all points, the machine, the engine at all
points in the opposite order, and so on. A round is simulated with the machine before it and the one after it.
Acceptance is that of K = 7, measured; the simulation of K = 3 takes its first three positions.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from dflash_trt.bench.machine import measure_machine
from dflash_trt.bench.machine_probes import CPU_SIZES, ProbeEngine
from dflash_trt.core.acceptance import accepted_fractions
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import open_executor
from dflash_trt.plan.machine_file import MachineFile
from dflash_trt.plan.step_costs import StepClock
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.simulation.acceptance import AcceptanceByPosition
from dflash_trt.simulation.load import LoadResult, RequestLoad, drive, result_of
from dflash_trt.simulation.sweep import SimulatedEngine, simulate

DRAFTS = (0, 3, 7)
R = TypeVar("R")
_KV_BYTES = 512 << 20
_NUM_ARRIVALS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--request-rate", help="requests per second of Poisson arrivals, instead of --concurrency")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens before each prompt, the same for all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = EngineDir.open(options.engine)
    prompts = partial(load_of, engine, options.prompts, num_tokens=options.tokens, num_shared=options.shared_prefix)
    if options.request_rate:
        loads = [prompts(_NUM_ARRIVALS, rate=float(word)) for word in options.request_rate.split(",")]
    else:
        loads = [prompts(int(word)) for word in options.concurrency.split(",")]
    sides = Sides(engine)
    sides.run(loads[0], 0), sides.run(loads[0], 7)  # warm
    rows: list[dict[str, Any]] = []
    pace = Pace()
    machines = [pace.around(machine)]
    for index in range(options.rounds):
        order = [(load, drafts) for load in range(len(loads)) for drafts in DRAFTS][:: -1 if index % 2 else 1]
        measured = {key: pace.around(partial(sides.run, loads[key[0]], key[1])) for key in order}
        acceptance = AcceptanceByPosition(sides.accepted())
        machines.append(pace.around(machine))
        for (load, drafts), (found, reference_s) in measured.items():
            around = [
                (simulated(engine, item, loads[load], drafts, acceptance), known_s / reference_s)
                for item, known_s in machines[-2:]
            ]
            rows.append(row_of(index, str(loads[load]), drafts, found, around))
    report(rows)
    if options.json:
        files = [json.loads(item.text()) | {"reference_s": seconds} for item, seconds in machines]
        options.json.write_text(json.dumps({"rows": rows, "machines": files}, indent=1))


class Pace:
    """How fast this thread is now: seconds of a fixed reference work."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self._engines = [ProbeEngine(CPU_SIZES[-1], device, has_drafter=has) for has in (False, True)]
        self._probes = [
            engine.step(num_requests=4, num_tokens=drafts + 1, context_len=200, num_drafts=drafts)
            for engine, drafts in zip(self._engines, (0, 7), strict=True)
        ]

    def around(self, run: Callable[[], R]) -> tuple[R, float]:
        """What `run` gives, and the mean of the reference before and after it."""
        before_s = self._seconds()
        return run(), (before_s + self._seconds()) / 2

    def _seconds(self) -> float:
        return sum(statistics.median(probe.seconds(probe.plan) for _ in range(7)) for probe in self._probes)


def machine() -> MachineFile:
    return measure_machine("this CPU", torch.device("cpu"), lambda line: print(f"machine: {line}", flush=True))


def load_of(
    engine: EngineDir, path: Path, concurrency: int, num_tokens: int, *, num_shared: int = 0, rate: float | None = None
) -> RequestLoad:
    """So many clients, or arrivals at a rate; all prompts begin with `num_shared` tokens, those of the first ones."""
    from dflash_trt.bench.throughput import prompt_reader

    reader = prompt_reader(engine)
    prompts = [reader.read(json.loads(line)["prompt"]) for line in path.read_text().splitlines()]
    shared = tuple(itertools.islice(itertools.cycle(itertools.chain(*prompts)), num_shared))
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=shared + tuple(prompts[i % len(prompts)]),
            sampling=SamplingParams(max_new_tokens=num_tokens, ignore_eos=True),
        )
        for i in range(max(4, 2 * concurrency))
    ]
    load = RequestLoad(requests=requests, concurrency=concurrency, reuses_prefixes=num_shared > 0)
    return load if rate is None else replace(load, concurrency=None, request_rate_per_s=rate)


class ThreadClock:
    """CPU time of this thread, and the times when there was nothing to compute."""

    def __init__(self) -> None:
        self._idle_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._idle_s

    def reach(self, time_s: float) -> None:
        self._idle_s += max(0.0, time_s - self())


class Sides:
    """The engine with its drafter and without, in this thread."""

    def __init__(self, engine: EngineDir) -> None:
        config = RuntimeConfig(num_threads=1, device="cpu", kv_cache_bytes=_KV_BYTES)
        self._executors = {
            has_drafter: open_executor(engine, config.replaced(use_drafter=has_drafter))
            for has_drafter in (False, True)
        }
        self._outputs: list[Any] = []

    def run(self, load: RequestLoad, drafts: int) -> LoadResult:
        executor = self._executors[drafts > 0]
        clock = ThreadClock()
        config = SchedulerConfig(enable_prefix_caching=load.reuses_prefixes)
        scheduler = Scheduler(executor.limits, config, FixedDraftLength(drafts))
        with closing(EngineLoop(executor, scheduler, clock=clock)) as loop:
            outputs, duration_s = drive(loop, load, clock=clock, skip_to=clock.reach)
        if drafts == max(DRAFTS):
            self._outputs += outputs
        return result_of(outputs, duration_s)

    def accepted(self) -> tuple[float, ...]:
        return accepted_fractions(self._outputs)


def simulated(
    engine: EngineDir, machine: MachineFile, load: RequestLoad, drafts: int, acceptance: AcceptanceByPosition
) -> LoadResult:
    manifest = engine.manifest
    assert machine.costs is not None
    described = SimulatedEngine(
        pretrained_config=manifest.pretrained_config,
        limits=manifest.build_config,
        num_pages=_KV_BYTES // (manifest.pretrained_config.states().bytes_per_token * manifest.build_config.page_size),
        clock=StepClock(machine.gpu, machine.costs),
        drafter="DFlash" if drafts else "AR",
        num_draft_tokens=drafts,
        acceptance=acceptance if drafts else None,
    )
    return simulate(described, load, EngineWork(manifest.pretrained_config, has_drafter=drafts > 0))[0]


def row_of(
    index: int, load: str, drafts: int, found: LoadResult, around: list[tuple[LoadResult, float]]
) -> dict[str, Any]:
    """`around` are simulations, with the pace of the point over that of the simulation's machine."""
    per_user = [pace * (item.tok_per_s_per_user or 0.0) for item, pace in around]
    return {
        "round": index,
        "load": load,
        "num_draft_tokens": drafts,
        "measured_tok_per_s": found.output_tok_per_s,
        "simulated_tok_per_s": statistics.harmonic_mean([pace * item.output_tok_per_s for item, pace in around]),
        "measured_tok_per_s_per_user": found.tok_per_s_per_user,
        "simulated_tok_per_s_per_user": statistics.harmonic_mean(per_user),
        "measured_ttft_ms": 1e3 * found.time_to_first_token_p50_s,
        "simulated_ttft_ms": statistics.fmean(1e3 * item.time_to_first_token_p50_s / pace for item, pace in around),
        "measured_acceptance_length": found.acceptance_length,
        "simulated_acceptance_length": around[0][0].acceptance_length,
        "pace": statistics.fmean(pace for _, pace in around),
    }


def report(rows: list[dict[str, Any]]) -> None:
    names = {"tok_per_s": "tok/s", "tok_per_s_per_user": "per user", "ttft_ms": "TTFT ms"}
    print(f"| load | K | {' | '.join(f'{name} measured | simulated | ratio (rounds)' for name in names.values())} |")
    print(f"|---|---:|{'---:|---:|---|' * len(names)}")
    worst = 0.0
    for key in dict.fromkeys((row["load"], row["num_draft_tokens"]) for row in rows):
        mine = [row for row in rows if (row["load"], row["num_draft_tokens"]) == key]
        cells, ratios = [], []
        for name in names:
            by_round = [row[f"simulated_{name}"] / row[f"measured_{name}"] for row in mine]
            ratio = statistics.median(by_round)
            ratios.append(ratio)
            medians = [statistics.median(row[f"{side}_{name}"] for row in mine) for side in ("measured", "simulated")]
            rounds = " ".join(f"{value:.2f}" for value in by_round)
            cells.append(f"{medians[0]:.3g} | {medians[1]:.3g} | {ratio:.2f} ({rounds})")
        worst = max(worst, *(abs(ratio - 1) for ratio in ratios))
        print(f"| {key[0]} | {key[1]} | {' | '.join(cells)} |")
    print(f"largest deviation of a median: {worst:.1%}")


if __name__ == "__main__":
    main()
