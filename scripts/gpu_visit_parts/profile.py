"""One decode step under PyTorch's profiler: what the host asked of CUDA, and where the device's time went."""

import collections
import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.graphs import GraphCache, waits_raise
from dflash_trt.backends.padding import step_shape
from dflash_trt.core.batch import StepBatch, plan_of, run_batch
from gpu_visit_parts.results import Row, Tables
from gpu_visit_parts.setting import SETTING, Case, LeftOutError
from gpu_visit_parts.steps import decode_batch, open_engine

# Calls that make the host wait for the device. A step waits once, for the event after its results were copied.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitEvent")


_RECIPES = ("qwen3-8b-fp8", "gpt-oss-120b-mxfp4", "qwen3-coder-30b-fp8")


def cases(directory: Path) -> Iterator[Case]:
    recipes, batch_sizes = (("demo",), (1,)) if SETTING.is_dry_run else (_RECIPES, (1, 4, 32))
    for recipe, num_requests in itertools.product(recipes, batch_sizes):
        name = f"{recipe}, {num_requests} requests"
        yield Case(name=f"{name}: enqueueing waits for nothing", run=partial(_hidden_waits, recipe, num_requests))
        yield Case(name=f"{name}: profile", run=partial(_profile, recipe, num_requests, directory))


def _num_steps() -> int:
    return 1 if SETTING.is_dry_run else 4


def _step(recipe: str, num_requests: int) -> tuple[TorchGpuExecutor, StepBatch]:
    executor = open_engine((recipe, False)).executor
    num_drafts, context = (1, 20) if SETTING.is_dry_run else (7, 1024)
    batch = decode_batch(executor, num_requests, num_drafts, context)
    executor.warm_up([step_shape(plan_of(batch, max_pages=executor.limits.max_pages), executor.limits)])
    return executor, batch


def _hidden_waits(recipe: str, num_requests: int) -> Tables:
    """PyTorch raises on every operation of its own that would wait for the device while a step is enqueued."""
    executor, batch = _step(recipe, num_requests)
    graphs, executor.graphs = executor.graphs, GraphCache(None)  # launch by launch, not a replay
    try:
        executor.wait()
        if SETTING.device.type != "cuda":
            executor.enqueue(batch)
            raise LeftOutError("a CPU has nothing to wait for")
        with waits_raise():
            executor.enqueue(batch)
        executor.wait()
    finally:
        executor.graphs = graphs
    return {
        "waits of PyTorch while a step is enqueued": [{"recipe": recipe, "requests": num_requests, "found": "none"}]
    }


def _profile(recipe: str, num_requests: int, directory: Path) -> Tables:
    executor, batch = _step(recipe, num_requests)
    step = {"recipe": recipe, "requests": num_requests}
    with torch.profiler.profile(activities=_activities()) as profiler:
        for _ in range(_num_steps()):
            run_batch(executor, batch)
    profiler.export_chrome_trace(os.fspath(directory / f"trace-{recipe}-{num_requests}.json.gz"))
    events = profiler.events()
    on_host = (event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU)
    calls = collections.Counter(name for name in on_host if name.startswith("cu"))  # CUDA's runtime and driver
    # The profiler itself waits once, when it stops; what a step does, it does in every step.
    waits = {name: calls[name] / _num_steps() for name in WAITS if calls[name] >= _num_steps()}
    only_results = waits == {"cudaEventSynchronize": 1.0}
    kernels = [step | row for row in _kernels(events)]
    return {
        "waits of a step": [step | {"found": str(waits), "only_the_wait_for_results": str(only_results)}],
        "host calls of a step": [
            step | {"call": name, "per_step": count / _num_steps()} for name, count in sorted(calls.items())
        ],
        "device time of a step": kernels,
    }


def _activities() -> list[torch.profiler.ProfilerActivity]:
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU] + ([activity.CUDA] if SETTING.device.type == "cuda" else [])


def _kernels(events: Any) -> list[Row]:
    """The 25 that take the longest, and all of them together."""
    times: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            counts[event.name] += 1
    total = sum(times.values())
    rows: list[Row] = [{"kernel": "all", "launches": counts.total(), "us_per_step": total}]
    rows += [
        {"kernel": name[:90], "launches": counts[name], "us_per_step": took_us}
        for name, took_us in times.most_common(25)
    ]
    for row in rows:
        row["launches"] /= _num_steps()
        row["fraction"] = row["us_per_step"] / total if total else 0.0
        row["us_per_step"] /= _num_steps()
    return rows
