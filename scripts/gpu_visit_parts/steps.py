"""Time of a step of a recipe's engine, alone on the device and with the host around it, against its floor."""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from dflash_trt import SamplingParams
from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import step_shape, warm_shapes
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, WindowColumns, plan_of, run_batch
from dflash_trt.core.request import Request
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import ExecutorLimits, num_pages_for
from dflash_trt.network.state import RecurrentCache
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.step_work import EngineWork
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from gpu_visit_parts.models import recipe_engine
from gpu_visit_parts.results import Tables
from gpu_visit_parts.setting import SETTING, Case, LeftOutError
from gpu_visit_parts.timing import elapsed_ms, machine_roofs

NUM_STEPS = 8
RECIPES = (
    *("qwen3-8b-bf16", "qwen3-8b-fp8", "gpt-oss-20b-mxfp4", "gpt-oss-120b-mxfp4", "qwen3-coder-30b-fp8"),
    *("qwen3.6-27b-bf16", "qwen3.6-35b-a3b-bf16", "gemma-4-26b-a4b-bf16"),
)
FIXED_TILES = RECIPES[:2]  # whose steps are timed in deterministic mode, too

_Engine = tuple[str, bool]  # recipe, deterministic
_open: dict[_Engine, "OpenEngine"] = {}  # the one that is held: cases of one engine follow each other


class OpenEngine:
    """An executor on the GPU, and the work of its steps."""

    def __init__(self, recipe: str, *, is_deterministic: bool = False) -> None:
        with ExitStack() as stack:
            engine = stack.enter_context(recipe_engine(recipe))
            config = RuntimeConfig(deterministic=is_deterministic, kv_cache_bytes=SETTING.kv_cache_bytes)
            started_s = time.perf_counter()
            self.executor = TorchGpuExecutor.open(engine, config, draft_lens=(), device=SETTING.device)
            self.open_s = time.perf_counter() - started_s
            self.format = engine.manifest.pretrained_config
        self._work = {has: EngineWork(self.format, has_drafter=has) for has in (False, True)}

    def floor_ms(self, rows: ComputedRows) -> float:
        """All bytes at the rate of copies or all products at theirs, as if each ran alone; states are written, too."""
        work = self._work[rows.num_draft_tokens > 0].of(rows)
        formats = {product.format for product in work.products}
        flops = sum(product.flops for product in work.products) + work.mixing_flops
        num_bytes = work.weights_bytes + work.kv_bytes
        return machine_roofs().floor_us(num_bytes=num_bytes, flops=flops, is_fp8="fp8" in formats) / 1e3


def cases() -> Iterator[Case]:
    """Engine by engine; batch sizes above a recipe's limit are left out."""
    recipes, batch_sizes, draft_lens = RECIPES, (1, 4, 16, 32, 64), (0, 3, 7, 15)
    fixed, looped, contexts, lengths = FIXED_TILES, (0, 7), (1024, 8192), (512, 2048)
    if SETTING.is_dry_run:
        recipes, batch_sizes, draft_lens = ("demo",), (1, 2), (0, 2)
        fixed, looped, contexts, lengths = ("demo",), (2,), (20,), (6,)
    for recipe in recipes:
        for context, num_requests, num_drafts in itertools.product(contexts, batch_sizes, draft_lens):
            yield _case((recipe, False), context, num_requests, num_drafts)
        for length in lengths:
            yield Case(name=f"{recipe}, a prompt of {length}", run=partial(_measured_prompt, recipe, length))
        for num_requests, num_drafts in itertools.product(batch_sizes[::2], looped):
            name = f"{recipe}, the loop of {num_requests} requests, {num_drafts} drafts"
            yield Case(name=name, run=partial(_measured_loop, recipe, num_requests, num_drafts))
    for recipe, num_requests, num_drafts in itertools.product(fixed, batch_sizes, draft_lens[::2]):
        yield _case((recipe, True), contexts[0], num_requests, num_drafts)


def _case(engine: _Engine, context: int, num_requests: int, num_drafts: int) -> Case:
    name = f"{engine[0]} over {context}, {num_requests} requests, {num_drafts} drafts"
    name += ", deterministic" if engine[1] else ""
    return Case(name=name, run=partial(_measured, engine, context, num_requests, num_drafts))


def _measured(engine: _Engine, context: int, num_requests: int, num_drafts: int) -> Tables:
    opened = open_engine(engine)
    executor = opened.executor
    _check_limits(executor, num_requests=num_requests, num_drafts=num_drafts)
    if num_requests * num_pages_for(context + num_drafts + 1, executor.limits.page_size) > executor.limits.num_pages:
        raise LeftOutError("the K/V do not fit")
    times = step_times(executor, decode_batch(executor, num_requests, num_drafts, context))
    floor_ms = opened.floor_ms(
        ComputedRows.decode(num_requests=num_requests, context_len=context, num_draft_tokens=num_drafts)
    )
    row = {"recipe": engine[0], "context": context, "requests": num_requests, "drafts": num_drafts}
    row |= {"deterministic": str(engine[1]), "rows_per_s": 1e3 * num_requests * (num_drafts + 1) / times["device_ms"]}
    row |= times | {"floor_ms": floor_ms, "floor_fraction": floor_ms / times["device_ms"]}
    return {"steps": [row | {"open_s": opened.open_s, "peak_gib": _peak_gib()}]}


def _measured_loop(recipe: str, num_requests: int, num_drafts: int) -> Tables:
    """Steps as the engine runs them: planned, chained and read by the host beside the device.

    Random weights accept no draft, so that every step has all requests and gives each a token.
    """
    executor = open_engine((recipe, False)).executor
    _check_limits(executor, num_requests=num_requests, num_drafts=num_drafts)
    started_s = time.perf_counter()
    if not SETTING.is_dry_run:
        executor.warm_up(warm_shapes(executor.limits, (num_drafts,), tile_edges=executor.tile_edges))
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
    row = {"recipe": recipe, "requests": num_requests, "drafts": num_drafts}
    row |= {"loop_step_ms": statistics.median(walls), "longest_ms": max(walls)}
    return {"loops": [row | {"warm_up_s": warm_up_s, "graphs": executor.graphs.num_graphs}]}


def _measured_prompt(recipe: str, length: int) -> Tables:
    """One whole prompt, behind which a block is drafted."""
    opened = open_engine((recipe, False))
    limits = opened.executor.limits
    if length > limits.max_num_tokens:
        raise LeftOutError(f"steps of this engine have at most {limits.max_num_tokens} tokens")
    request = _request(limits, 0, tuple(range(1, length + 1)), context=0, num_candidates=0)
    times = step_times(opened.executor, StepBatch(requests=(request,), num_draft_tokens=limits.max_draft_len))
    rows = ComputedRows(
        num_tokens=np.array([length]), context_lens=np.array([0]), num_draft_tokens=limits.max_draft_len
    )
    floor_ms = opened.floor_ms(rows)
    row = {"recipe": recipe, "tokens": length, "tok_per_s": 1e3 * length / times["device_ms"]}
    return {"prompts": [row | times | {"floor_ms": floor_ms, "floor_fraction": floor_ms / times["device_ms"]}]}


def open_engine(engine: _Engine) -> OpenEngine:
    if engine not in _open:
        _open.clear()
        gc.collect()
        if SETTING.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        _open[engine] = OpenEngine(engine[0], is_deterministic=engine[1])
    return _open[engine]


def _check_limits(executor: TorchGpuExecutor, *, num_requests: int, num_drafts: int) -> None:
    limits = executor.limits
    if num_requests > limits.max_batch_size or num_drafts > limits.max_draft_len:
        raise LeftOutError(f"at most {limits.max_batch_size} requests and {limits.max_draft_len} drafts")


def _peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if SETTING.device.type == "cuda" else 0.0


def decode_batch(executor: TorchGpuExecutor, num_requests: int, num_drafts: int, context: int) -> StepBatch:
    """Verify blocks after a context that was never computed: its pages hold zeros, which take as long to read."""
    generator = torch.Generator().manual_seed(num_requests)
    shape = (num_requests, num_drafts + 1)
    tokens = torch.randint(executor.network.target.vocab_size - 1, shape, generator=generator).tolist()
    requests = (
        _request(executor.limits, r, tuple(tokens[r]), context=context, num_candidates=num_drafts)
        for r in range(num_requests)
    )
    return StepBatch(requests=tuple(requests), num_draft_tokens=num_drafts)


def _request(
    limits: ExecutorLimits, index: int, token_ids: tuple[int, ...], *, context: int, num_candidates: int
) -> ScheduledRequest:
    """With pages of its own in every group; of prompts above a window, layers of the window write pages in turn."""
    size, end = limits.page_size, num_pages_for(context + len(token_ids), limits.page_size)
    windows = []
    for group in limits.page_windows:
        first = max(0, context - group.window + 1) // size
        pages = tuple((index * (end - first) + i) % group.num_pages for i in range(end - first))
        windows.append(WindowColumns(first, pages))
    return ScheduledRequest(
        request_id=str(index),
        token_ids=token_ids,
        context_len=context,
        num_candidates=num_candidates,
        page_ids=tuple(range(index * end, (index + 1) * end)),
        sampling=StepSampling(),
        window_pages=tuple(windows),
    )


def step_times(executor: TorchGpuExecutor, batch: StepBatch) -> dict[str, float]:
    """`step_ms` from call to result; `device_ms` back to back on the device; the gap is what the host adds.

    A step that runs again folds no records, so recurrent states are set back: each step folds a whole block.
    """
    num_steps = 1 if SETTING.is_dry_run else NUM_STEPS
    executor.warm_up([step_shape(plan_of(batch, max_pages=executor.limits.max_pages), executor.limits)])
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
