"""The TensorRT executor: the step as one engine call, behind the same protocol as the torch executor.

Knows profiles, buffers and padding; the engine knows the network. Imports TensorRT, and touches the GPU, in `open`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_trt.backends.graphs import CudaCapture, GraphCache
from dflash_trt.backends.padding import StepShape, full_block_shape, full_block_shapes
from dflash_trt.backends.page_budget import PagePlan, plan_engine_pages
from dflash_trt.backends.staging import StagedStep, new_timer
from dflash_trt.backends.step_inputs import check_plan
from dflash_trt.backends.tensorrt.buffers import StepBuffers
from dflash_trt.backends.tensorrt.context import ProfileContext
from dflash_trt.backends.tensorrt.engine import check_engine_io, deserialize
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.ops import PluginMode
from dflash_trt.core.batch import StepBatch, plan_of
from dflash_trt.core.step_plan import ExecutorLimits, StepPlan

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir

DECODE, MIXED = 0, 1  # profile indices, in the order the builder adds them
_FREE_MEMORY_FRACTION = 0.9


class TensorRTExecutor:
    """Implements `core.step_plan.StepExecutor` over a deserialized engine. Owns the pages and the slots.

    An error of a GPU is sticky: nothing runs after it in this process.
    """

    has_queue = True
    can_retry = False

    def __init__(
        self, engine: Any, spec: StepNetworkSpec, limits: ExecutorLimits, *, plugins: PluginMode, device: torch.device
    ) -> None:
        """Raises EngineDirError when the engine's tensors are not those of the step."""
        check_engine_io(engine, spec)
        self.limits = limits
        self.page_plan: PagePlan  # set by `open`, which knows the memory
        self._owners: tuple[Any, ...] = ()  # of the engine; released after it
        self._engine = engine
        self._spec = spec
        self._stream = _new_stream(device)
        self._buffers = StepBuffers(
            spec, replace(limits, max_draft_len=spec.max_draft_len if spec.has_drafts else 0), device=device
        )
        self._is_in_place = plugins == "plugin"
        has_graphs = self._is_in_place and device.type == "cuda"  # pools that are swapped have no fixed addresses
        self.graphs = GraphCache(CudaCapture(self._stream) if has_graphs else None)
        spare = self._buffers.state if self._is_in_place else _copies(self._buffers.state)
        self._written = spare  # where the next step's pages go; plain layers write into a second pool
        self._contexts = [
            ProfileContext(engine, index, self._buffers, self._stream, is_in_place=self._is_in_place)
            for index in (DECODE, MIXED)
        ]

    @classmethod
    def open(
        cls,
        engine_dir: EngineDir,
        config: RuntimeConfig,
        *,
        draft_lens: Sequence[int] | None = None,
        plugin_library: Path | None = None,
    ) -> TensorRTExecutor:
        """Rank 0 of an engine directory, on the current GPU. Without `use_drafter` no drafts are offered or verified.

        Full verify blocks of every K in `draft_lens` are captured ahead; None: of the engine's largest.
        `plugin_library` defaults to where it was when the engine was built.

        Raises:
            CapacityError: see `plan_engine_pages`.
            EngineDirError: no GPU, no TensorRT, no plugin library, or an engine made for others.
        """
        from dflash_trt.backends.tensorrt.compatibility import check_identity, plan_path, spec_of

        record, library = check_identity(engine_dir, plugin_library=plugin_library)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)  # the CPU still packs and reads steps
        spec, build = spec_of(engine_dir), engine_dir.manifest.build_config
        engine, owners = deserialize(plan_path(engine_dir), plugins=record.plugins, plugin_library=library)
        pages = plan_engine_pages(
            engine_dir.manifest,
            config.model_copy(update={"use_drafter": True}),  # the engine has the drafter's pages in any case
            free_bytes=lambda: int(torch.cuda.mem_get_info()[0]),
            default_fraction=_FREE_MEMORY_FRACTION,
            num_pools=1 if record.plugins == "plugin" else 2,  # plain layers write into a second one
        )
        limits = ExecutorLimits(
            max_batch_size=build.max_batch_size,
            max_seq_len=build.max_seq_len,
            max_num_tokens=build.max_num_tokens,
            max_draft_len=spec.max_draft_len if config.use_drafter else 0,
            page_size=spec.page_size,
            num_pages=pages.num_pages,
        )
        executor = cls(engine, spec, limits, plugins=record.plugins, device=torch.device("cuda"))
        executor.page_plan = pages
        executor._owners = owners
        executor.warm_up((limits.max_draft_len,) if draft_lens is None else draft_lens)
        return executor

    @torch.inference_mode()
    def warm_up(self, draft_lens: Iterable[int]) -> None:
        """Capture the graphs of full verify blocks of these K, before serving.

        The steps consist of padding alone, which touches the scratch page alone.
        """
        lens = {min(length, self.limits.max_draft_len) for length in draft_lens}
        for length in sorted(lens - {0} if self._spec.has_drafts else {0}, reverse=True):
            for shape in reversed(full_block_shapes(self.limits, num_draft_tokens=length)):
                self._buffers.staging.stage(plan_of(StepBatch(requests=(), num_draft_tokens=length)), shape)
                with self._on_stream():
                    self._buffers.staging.upload()
                    self.graphs.capture(shape, partial(self._enqueue, shape))

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> StagedStep:
        """Put one step on the stream. Shapes and limits are the caller's duty, so a violation is a bug and asserted.

        An engine with a drafter drafts a token at least, whether or not it was asked for.
        """
        check_plan(plan, self.limits)
        given = self._with_drafts(plan)
        shape = full_block_shape(given, self.limits)
        self._buffers.staging.stage(given, shape)
        with self._on_stream():
            started = new_timer(self._buffers.device)
            self._buffers.staging.upload()
            self._run(shape)
            result = self._buffers.results.download(
                shape, num_requests=plan.rows.num_requests, has_drafts=plan.rows.num_draft_tokens > 0
            )
        return StagedStep(result, started)

    def close(self) -> None:
        """Give engine, contexts and pages back to the device at once, whoever still holds the executor.

        Closing again does nothing.
        """
        if "_engine" not in vars(self):
            return
        on_gpu = self._buffers.device.type == "cuda"
        if on_gpu:
            self._stream.synchronize()
        for name in ("_contexts", "_engine", "_owners", "_written", "_buffers"):  # contexts before their engine
            del vars(self)[name]
        if on_gpu:
            torch.cuda.empty_cache()

    def pages(self) -> dict[str, Tensor]:
        """The pages as they are now, by state name; the last one is the scratch page of padding requests."""
        return dict(self._buffers.state)

    def fill_pages(self, value: float) -> None:
        """Overwrite everything: for canaries, never while requests are alive."""
        for pages in (*self._buffers.state.values(), *self._written.values()):
            pages.fill_(value)

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """With the K of the engine's step: an engine with a drafter drafts a token at least."""
        num_drafts = max(plan.rows.num_draft_tokens, 1) if self._spec.has_drafts else 0
        if num_drafts == plan.rows.num_draft_tokens:
            return plan
        return replace(plan, rows=replace(plan.rows, num_draft_tokens=num_drafts))

    def _enqueue(self, shape: StepShape) -> None:
        """The launches of a step; what a CUDA graph holds."""
        context = self._contexts[DECODE if shape.is_decode else MIXED]
        self._buffers.staging.assemble(shape)
        context.enqueue(self._buffers.shapes(shape), written=self._written)
        self._buffers.store(shape)

    def _run(self, shape: StepShape) -> None:
        self.graphs.run(shape, partial(self._enqueue, shape))
        if not self._is_in_place:
            self._buffers.state, self._written = self._written, self._buffers.state

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._buffers.device.type == "cuda" else contextlib.nullcontext()


class _HostStream:
    """Stands in for a CUDA stream where tensors are on the host."""

    cuda_stream = 0


def _new_stream(device: torch.device) -> Any:
    make_stream: Any = torch.cuda.Stream  # untyped in PyTorch
    return make_stream(device) if device.type == "cuda" else _HostStream()


def _copies(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(pages) for name, pages in state.items()}
