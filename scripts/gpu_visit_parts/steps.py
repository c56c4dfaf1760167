"""Time of a decode step, alone on the device and with the host around it, against its floor."""

import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import step_shape
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of, run_batch
from gpu_visit_parts.models import draft_spec, kv_bytes, linear_flops, make_executor, target_spec, weight_bytes
from gpu_visit_parts.results import Tables
from gpu_visit_parts.setting import SETTING, Case, LeftOutError
from gpu_visit_parts.timing import elapsed_ms, machine_roofs

NUM_STEPS = 8
_LEFT_BYTES = 24 * 2**30  # for weights and activations

_Engine = tuple[str, str, int, int, bool]  # model, format of the weights, context, largest batch, deterministic
_open: dict[_Engine, TorchGpuExecutor] = {}  # the one executor that is held: cases of one engine follow each other


def cases() -> Iterator[Case]:
    if SETTING.is_dry_run:
        engines, batch_sizes, draft_lens = [("tiny", "fp8", 20)], (1, 2), (0, 2)
    else:
        engines = [("qwen3-8b", weights, context) for weights in ("bf16", "fp8") for context in (1024, 8192)]
        batch_sizes, draft_lens = (1, 4, 16, 64), (0, 3, 7, 15)
    for is_deterministic in (False, True):  # the cost of the setting is the ratio of two rows
        lens = draft_lens[::2] if is_deterministic else draft_lens
        for engine, num_requests, length in itertools.product(engines, batch_sizes, lens):
            model, weights, context = engine
            name = f"{model} {weights} over {context}, {num_requests} requests, {length} drafts"
            name += ", deterministic" if is_deterministic else ""
            opened = (*engine, batch_sizes[-1], is_deterministic)
            yield Case(name=name, run=partial(_measured, opened, num_requests, length))


def _measured(engine: _Engine, num_requests: int, num_drafts: int) -> Tables:
    model, weights, context, _, is_deterministic = engine
    target = target_spec(model)
    draft = draft_spec(model, target)
    executor = open_executor(engine)
    if num_requests > executor.limits.max_batch_size:
        raise LeftOutError(f"the K/V of {executor.limits.max_batch_size} requests fill the GPU")
    batch = decode_batch(num_requests, num_drafts, context, vocab_size=target.vocab_size)
    times = _step_times(executor, batch)
    num_rows = num_requests * (num_drafts + 1)
    flops = linear_flops(target, draft, num_tokens=num_rows, num_rows=num_rows, num_drafts=num_requests * num_drafts)
    num_bytes = weight_bytes(target, draft, weights, has_drafts=num_drafts > 0)
    num_bytes += num_requests * context * kv_bytes(target, draft)
    floor_ms = machine_roofs().floor_us(num_bytes=num_bytes, flops=flops, is_fp8=weights == "fp8") / 1e3
    row = {"model": model, "weights": weights, "context": context, "requests": num_requests, "drafts": num_drafts}
    row |= {"deterministic": str(is_deterministic), "rows_per_s": 1e3 * num_rows / times["device_ms"]}
    return {"steps": [row | times | {"floor_ms": floor_ms, "floor_fraction": floor_ms / times["device_ms"]}]}


def open_executor(engine: _Engine) -> TorchGpuExecutor:
    """With pages for as many requests as fit, up to the largest batch."""
    if engine not in _open:
        _open.clear()
        gc.collect()
        torch.cuda.empty_cache()
        model, weights, context, most, is_deterministic = engine
        target = target_spec(model)
        draft = draft_spec(model, target)
        max_seq_len = context + draft.max_draft_len + 1
        if SETTING.device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info()[0] - _LEFT_BYTES
            most = min(most, free_bytes // (max_seq_len * kv_bytes(target, draft)))
        if most < 1:
            raise LeftOutError("the K/V of one request do not fit")
        _open[engine] = make_executor(
            target, draft, weights, max_batch_size=most, max_seq_len=max_seq_len, is_deterministic=is_deterministic
        )
    return _open[engine]


def decode_batch(num_requests: int, num_drafts: int, context: int, *, vocab_size: int) -> StepBatch:
    """Verify blocks after a context that was never computed: its pages hold zeros, which take as long to read."""
    needed = -(-(context + num_drafts + 1) // SETTING.page_size)
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


def _step_times(executor: TorchGpuExecutor, batch: StepBatch) -> dict[str, float]:
    """`step_ms` from call to result; `device_ms` back to back on the device; the gap is what the host adds."""
    num_steps = 1 if SETTING.is_dry_run else NUM_STEPS
    executor.warm_up([step_shape(plan_of(batch), executor.limits)])
    walls = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        run_batch(executor, batch)
        walls.append(1e3 * (time.perf_counter() - started_s))
    step_ms = statistics.median(walls)
    device_ms = elapsed_ms(lambda: executor.enqueue(batch, times=num_steps), executor.on_stream()) / num_steps
    return {"step_ms": step_ms, "device_ms": device_ms, "host_gap_fraction": max(0.0, 1 - device_ms / step_ms)}
