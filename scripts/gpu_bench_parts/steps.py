"""Time of a decode step, alone on the device and with the host around it, against its floor."""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from gpu_bench_parts.models import (
    PAGE_SIZE,
    draft_spec,
    kv_bytes,
    linear_flops,
    make_executor,
    target_spec,
    weight_bytes,
)
from gpu_bench_parts.report import Report
from gpu_bench_parts.timing import Roofs

NUM_HOST_STEPS = 8
NUM_DEVICE_STEPS = 8


def measure_steps(
    report: Report,
    roofs: Roofs,
    *,
    deadline_s: float,
    models: Sequence[str],
    formats: Sequence[str],
    contexts: Sequence[int],
    batch_sizes: Sequence[int],
    draft_lens: Sequence[int],
) -> None:
    for model, weight_format, context in itertools.product(models, formats, contexts):
        target = target_spec(model)
        draft = draft_spec(model, target)
        lens = sorted({min(length, draft.max_draft_len) for length in draft_lens})
        fitting = _fitting(report, f"{model} {weight_format}", context, batch_sizes, kv_bytes(target, draft))
        if not fitting or time.monotonic() > deadline_s:
            report.leave_out(f"steps of {model} {weight_format} over {context}: out of time or memory")
            continue
        try:
            executor = make_executor(
                target,
                draft,
                weight_format,
                max_batch_size=max(fitting),
                max_seq_len=_max_seq_len(context, draft.max_draft_len),
            )
        except torch.OutOfMemoryError:
            report.leave_out(f"steps of {model} {weight_format} over {context}: out of memory")
            continue
        for num_requests, length in itertools.product(fitting, lens):
            name = f"{model} {weight_format} over {context}, {num_requests} requests, {length} drafts"
            if time.monotonic() > deadline_s:
                report.leave_out(f"step of {name}: out of time")
                continue
            row = {"model": model, "weights": weight_format, "context": context}
            row |= {"requests": num_requests, "drafts": length}
            batch = decode_batch(num_requests, length, context, vocab_size=target.vocab_size)
            try:
                row |= _step_times(executor, batch)
            except (RuntimeError, ValueError) as error:
                report.fail(f"step of {name}", error)
                continue
            num_rows = num_requests * (length + 1)
            flops = linear_flops(
                target, draft, num_tokens=num_rows, num_rows=num_rows, num_drafts=num_requests * length
            )
            read_bytes = weight_bytes(target, draft, weight_format, has_drafts=length > 0)
            total_bytes = read_bytes + num_requests * context * kv_bytes(target, draft)
            floor_us = roofs.floor_us(num_bytes=total_bytes, flops=flops, is_fp8=weight_format == "fp8")
            row |= {"floor_ms": floor_us / 1e3, "floor_fraction": floor_us / 1e3 / row["device_ms"]}
            report.add("steps", row)
        del executor
        gc.collect()
        torch.cuda.empty_cache()


def _max_seq_len(context: int, max_draft_len: int) -> int:
    return context + max_draft_len + 1


def _fitting(report: Report, name: str, context: int, batch_sizes: Sequence[int], token_bytes: int) -> list[int]:
    """Batch sizes whose pages leave 24 GiB for weights and activations."""
    free_bytes, _ = torch.cuda.mem_get_info()
    fitting = []
    for size in batch_sizes:
        needed = size * _max_seq_len(context, 15) * token_bytes + 24 * 2**30 * (token_bytes > 100_000)
        if needed <= free_bytes:
            fitting.append(size)
        else:
            report.leave_out(f"steps of {name} over {context}, {size} requests: {needed / 2**30:.0f} GiB do not fit")
    return fitting


def decode_batch(num_requests: int, num_drafts: int, context: int, *, vocab_size: int) -> StepBatch:
    """Verify blocks after a context that was never computed: its pages hold zeros, which take as long to read."""
    needed = -(-(context + num_drafts + 1) // PAGE_SIZE)
    generator = torch.Generator().manual_seed(num_requests)
    tokens = torch.randint(vocab_size - 1, (num_requests, num_drafts + 1), generator=generator).tolist()
    return StepBatch(
        requests=tuple(
            ScheduledRequest(
                request_id=str(r),
                token_ids=tuple(tokens[r]),
                context_len=context,
                num_candidates=num_drafts,
                page_ids=tuple(range(r * needed, (r + 1) * needed)),
                sampling=StepSampling(),
            )
            for r in range(num_requests)
        ),
        num_draft_tokens=num_drafts,
    )


def _step_times(executor, batch: StepBatch) -> dict[str, float]:
    """`step_ms` from call to result; `device_ms` back to back on the device; the gap is what the host adds."""
    for _ in range(3):  # compile, capture, replay
        executor.step(batch)
    walls = []
    for _ in range(NUM_HOST_STEPS):
        started_s = time.perf_counter()
        executor.step(batch)
        walls.append(1e3 * (time.perf_counter() - started_s))
    step_ms = statistics.median(walls)
    device_ms = _device_ms(executor, batch)
    return {
        "step_ms": step_ms,
        "device_ms": device_ms,
        "host_gap_fraction": max(0.0, 1 - device_ms / step_ms),
    }


def _device_ms(executor, batch: StepBatch) -> float:
    """Replays of the captured step, one after another, with nothing between them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(3):
        with executor.on_stream():
            start.record()
            executor.enqueue(batch, times=NUM_DEVICE_STEPS)
            stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / NUM_DEVICE_STEPS)
    return statistics.median(times)
