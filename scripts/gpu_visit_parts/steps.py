"""Time of a decode step, alone on the device and with the host around it, against its floor."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from dflash_trt import SamplingParams
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import step_shape, warm_shapes
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of, run_batch
from dflash_trt.core.request import Request
from dflash_trt.network.state import RecurrentCache
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from gpu_visit_parts.models import (
    draft_spec,
    kv_bytes,
    linear_flops,
    make_executor,
    slot_bytes,
    target_spec,
    weight_bytes,
)
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
            yield _case((*engine, batch_sizes[-1], is_deterministic), num_requests, length)
    yield from _loop_cases()
    yield from _hybrid_cases()


def _loop_cases() -> Iterator[Case]:
    """Steps as the engine runs them: planned, chained and read by the host beside the device."""
    if SETTING.is_dry_run:
        engine, batch_sizes, lens = ("tiny", "fp8", 20, 2, False), (2,), (2,)
    else:
        engine, batch_sizes, lens = ("qwen3-8b", "fp8", 1024, 64, False), (1, 16, 64), (0, 7)
    for num_requests, num_drafts in itertools.product(batch_sizes, lens):
        name = f"{engine[0]} {engine[1]}, the loop of {num_requests} requests, {num_drafts} drafts"
        yield Case(name=name, run=partial(_measured_loop, engine, num_requests, num_drafts))


def _hybrid_cases() -> Iterator[Case]:
    """Which have no deterministic steps on a GPU, and steps of prompts besides."""
    if SETTING.is_dry_run:
        engines, batch_sizes, draft_lens, lengths = [("tiny-hybrid", "fp8", 20)], (2,), (2,), (6,)
    else:
        engines = [("qwen3.6-27b", weights, 1024) for weights in ("bf16", "fp8")]
        batch_sizes, draft_lens, lengths = (1, 4, 16, 64), (0, 3, 7, 15), (512, 2048)
    for engine in engines:
        opened = (*engine, batch_sizes[-1], False)
        for num_requests, length in itertools.product(batch_sizes, draft_lens):
            yield _case(opened, num_requests, length)
        for length in lengths:
            name = f"{engine[0]} {engine[1]}, a prompt of {length}"
            yield Case(name=name, run=partial(_measured_prompt, opened, length))


def _case(engine: _Engine, num_requests: int, length: int) -> Case:
    model, weights, context, _, is_deterministic = engine
    name = f"{model} {weights} over {context}, {num_requests} requests, {length} drafts"
    name += ", deterministic" if is_deterministic else ""
    return Case(name=name, run=partial(_measured, engine, num_requests, length))


def _measured(engine: _Engine, num_requests: int, num_drafts: int) -> Tables:
    model, weights, context, _, is_deterministic = engine
    target = target_spec(model)
    draft = draft_spec(model, target)
    executor = open_executor(engine)
    if num_requests > executor.limits.max_batch_size:
        raise LeftOutError(f"the states of {executor.limits.max_batch_size} requests fill the GPU")
    batch = decode_batch(num_requests, num_drafts, context, vocab_size=target.vocab_size)
    times = _step_times(executor, batch)
    num_rows = num_requests * (num_drafts + 1)
    flops = linear_flops(target, draft, num_tokens=num_rows, num_rows=num_rows, num_drafts=num_requests * num_drafts)
    num_bytes = weight_bytes(target, draft, weights, has_drafts=num_drafts > 0)
    num_bytes += num_requests * (context * kv_bytes(target, draft) + 2 * slot_bytes(target, draft))
    floor_ms = machine_roofs().floor_us(num_bytes=num_bytes, flops=flops, is_fp8=weights == "fp8") / 1e3
    row = {"model": model, "weights": weights, "context": context, "requests": num_requests, "drafts": num_drafts}
    row |= {"deterministic": str(is_deterministic), "rows_per_s": 1e3 * num_rows / times["device_ms"]}
    return {"steps": [row | times | {"floor_ms": floor_ms, "floor_fraction": floor_ms / times["device_ms"]}]}


def _measured_loop(engine: _Engine, num_requests: int, num_drafts: int) -> Tables:
    """Random weights accept no draft, so that every step has all requests and gives each a token."""
    executor = open_executor(engine)
    started_s = time.perf_counter()
    executor.warm_up(warm_shapes(executor.limits, (num_drafts,)))
    warm_up_s = time.perf_counter() - started_s
    scheduler = Scheduler(executor.limits, SchedulerConfig(), FixedDraftLength(num_drafts))
    loop = EngineLoop(executor, scheduler, overlaps=True)
    num_steps = 2 if SETTING.is_dry_run else 64
    sampling = SamplingParams(max_new_tokens=8 * num_steps, ignore_eos=True)
    prompts = [tuple(range(1 + i, (4 if SETTING.is_dry_run else 32) + i)) for i in range(num_requests)]
    streams = [  # a stream that nobody holds is cancelled
        loop.submit(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        for i, prompt in enumerate(prompts)
    ]
    for _ in range(2 + num_steps // 2):
        loop.step()
    executor.wait()
    walls = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        has_run = loop.step()
        walls.append(1e3 * (time.perf_counter() - started_s))
    if not has_run:
        raise RuntimeError(f"{len(streams)} requests ended before the loop was measured")
    loop.close()
    row = {"model": engine[0], "weights": engine[1], "requests": num_requests, "drafts": num_drafts}
    row |= {"loop_step_ms": statistics.median(walls), "longest_ms": max(walls)}
    return {"loops": [row | {"warm_up_s": warm_up_s, "graphs": executor.graphs.num_graphs}]}


def _measured_prompt(engine: _Engine, length: int) -> Tables:
    """One whole prompt, behind which a block is drafted."""
    model, weights, *_ = engine
    target = target_spec(model)
    draft = draft_spec(model, target)
    executor = open_executor(engine)
    num_pages = -(-length // SETTING.page_size)
    if length > executor.limits.max_num_tokens or num_pages > executor.limits.max_pages:
        raise LeftOutError(f"steps of this engine have at most {executor.limits.max_num_tokens} tokens")
    request = ScheduledRequest(
        request_id="prompt",
        token_ids=tuple(range(1, length + 1)),
        context_len=0,
        num_candidates=0,
        page_ids=tuple(range(num_pages)),
        sampling=StepSampling(),
    )
    batch = StepBatch(requests=(request,), num_draft_tokens=draft.max_draft_len)
    times = _step_times(executor, batch)
    flops = linear_flops(
        target, draft, num_tokens=length, num_rows=draft.max_draft_len + 1, num_drafts=draft.max_draft_len
    )
    num_bytes = weight_bytes(target, draft, weights, has_drafts=True) + slot_bytes(target, draft)
    floor_ms = machine_roofs().floor_us(num_bytes=num_bytes, flops=flops, is_fp8=weights == "fp8") / 1e3
    row = {"model": model, "weights": weights, "tokens": length, "tok_per_s": 1e3 * length / times["device_ms"]}
    return {"prompts": [row | times | {"floor_ms": floor_ms, "floor_fraction": floor_ms / times["device_ms"]}]}


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
            of_request = max_seq_len * kv_bytes(target, draft) + slot_bytes(target, draft)
            most = min(most, free_bytes // of_request)
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
    """`step_ms` from call to result; `device_ms` back to back on the device; the gap is what the host adds.

    A step that runs again folds no records, so recurrent states are set back: each step folds a whole block.
    """
    num_steps = 1 if SETTING.is_dry_run else NUM_STEPS
    executor.warm_up([step_shape(plan_of(batch), executor.limits)])
    rewind, walls = _rewinding(executor, batch), []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        run_batch(executor, batch)
        rewind()
        walls.append(1e3 * (time.perf_counter() - started_s))
    step_ms = statistics.median(walls)
    device_ms = (
        elapsed_ms(lambda: executor.enqueue(batch, times=num_steps, after_each=rewind), executor.on_stream())
        / num_steps
    )
    return {"step_ms": step_ms, "device_ms": device_ms, "host_gap_fraction": max(0.0, 1 - device_ms / step_ms)}


def _rewinding(executor: TorchGpuExecutor, batch: StepBatch) -> Callable[[], None]:
    """Sets the states of verify blocks back by a block, on the current stream, in one launch for all layers."""
    positions = [x.tensors["position"] for x in executor._state.target_kv if isinstance(x, RecurrentCache)]
    width = max(len(request.token_ids) for request in batch.requests) if batch.requests[0].context_len else 0

    def rewind() -> None:
        if positions and width:
            with executor.on_stream():
                torch._foreach_sub_(positions, width)

    return rewind
