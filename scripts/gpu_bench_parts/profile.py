"""One decode step under PyTorch's profiler: what the host asked of CUDA, and where the device's time went."""

import collections
import os

import torch

from gpu_bench_parts.models import draft_spec, make_executor, target_spec
from gpu_bench_parts.report import Report
from gpu_bench_parts.steps import decode_batch

NUM_STEPS = 4
NUM_REQUESTS = 4
CONTEXT = 1024
# Calls that make the host wait for the device. A step waits once, for the event after its results were copied.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaStreamWaitEvent")


def profile_step(report: Report, *, model: str, weight_format: str) -> None:
    target = target_spec(model)
    draft = draft_spec(model, target)
    executor = make_executor(
        target, draft, weight_format, max_batch_size=NUM_REQUESTS, max_seq_len=CONTEXT + draft.draft_block_size
    )
    batch = decode_batch(NUM_REQUESTS, draft.max_draft_len, CONTEXT, vocab_size=target.vocab_size)
    for _ in range(3):
        executor.step(batch)
    _refuse_hidden_waits(executor, batch)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(NUM_STEPS):
            executor.step(batch)
    events = profiler.events()
    on_host = (event.name for event in events if event.device_type == torch.autograd.DeviceType.CPU)
    host_calls = collections.Counter(name for name in on_host if name.startswith("cu"))  # CUDA's runtime and driver
    for name, count in sorted(host_calls.items()):
        report.add("host calls of one decode step", {"call": name, "per_step": count / NUM_STEPS})
    # The profiler itself waits once, when it stops; what a step does, it does in every step.
    waits = {name: host_calls[name] / NUM_STEPS for name in WAITS if host_calls[name] >= NUM_STEPS}
    has_one_wait = waits == {"cudaEventSynchronize": 1.0}
    report.add("waits", {"found": str(waits), "only_the_wait_for_results": str(has_one_wait)})
    _add_kernels(report, events)
    report.directory.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(os.fspath(report.directory / "trace.json.gz"))


def _refuse_hidden_waits(executor, batch) -> None:
    """PyTorch raises on every operation of its own that would wait for the device while a step is enqueued."""
    executor.wait()
    graphs, executor.graphs = executor.graphs, type(executor.graphs)(None)  # launch by launch, not a replay
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.enqueue(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        executor.graphs = graphs
    executor.wait()


def _add_kernels(report: Report, events) -> None:
    times, counts = collections.Counter(), collections.Counter()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time
            counts[event.name] += 1
    total = sum(times.values())
    for name, took_us in times.most_common(25):
        report.add(
            "device time of one decode step",
            {
                "kernel": name[:90],
                "launches": counts[name] / NUM_STEPS,
                "us_per_step": took_us / NUM_STEPS,
                "fraction": took_us / total,
            },
        )
