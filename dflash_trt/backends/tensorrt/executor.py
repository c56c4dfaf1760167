"""The TensorRT executor: the step as one engine call, behind the same protocol as the torch executor.

Knows profiles, buffers and padding; the engine knows the network. Imports TensorRT, and touches the GPU, in `open`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_trt.backends.page_budget import PagePlan, plan_engine_pages
from dflash_trt.backends.step_inputs import step_inputs, step_result
from dflash_trt.backends.tensorrt.buffers import Shapes, StepBuffers
from dflash_trt.backends.tensorrt.context import ProfileContext
from dflash_trt.backends.tensorrt.engine import check_engine_io, deserialize
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.ops import PluginMode
from dflash_trt.core.batch import ExecutorLimits, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.network.ops import Acceptance
from dflash_trt.network.step import StepOutputs

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir

DECODE, MIXED = 0, 1  # profile indices, in the order the builder adds them
_FREE_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodeStep:
    """A step of verify blocks only, padding requests included in `num_requests` and last."""

    num_real: int
    num_requests: int
    width: int  # K + 1
    shapes: Shapes


class TensorRTExecutor:
    """Implements `core.batch.StepExecutor` over a deserialized engine. Owns the pages."""

    def __init__(
        self,
        engine: Any,
        spec: StepNetworkSpec,
        limits: ExecutorLimits,
        *,
        plugins: PluginMode,
        device: torch.device,
    ) -> None:
        """Raises EngineDirError when the engine's tensors are not those of the step."""
        check_engine_io(engine, spec)
        self.limits = limits
        self.page_plan: PagePlan  # set by `open`, which knows the memory
        self._owners: tuple[Any, ...] = ()  # of the engine; released after it
        self._engine = engine
        self._spec = spec
        self._stream = _new_stream(device)
        self._buffers = StepBuffers(spec, limits, device=device)
        self._is_in_place = plugins == "plugin"
        spare = self._buffers.state if self._is_in_place else _copies(self._buffers.state)
        self._written = spare  # where the next step's pages go; plain layers write into a second pool
        self._contexts = [
            ProfileContext(engine, index, self._buffers, self._stream, swap=not self._is_in_place)
            for index in (DECODE, MIXED)
        ]
        self._last: _DecodeStep | None = None  # for `follow`

    @classmethod
    def open(
        cls,
        engine_dir: EngineDir,
        config: RuntimeConfig,
        *,
        plugin_library: Path | None = None,
    ) -> TensorRTExecutor:
        """Rank 0 of an engine directory, on the current GPU. Without `use_drafter` no drafts are offered or verified.

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
        return executor

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepResult:
        """Run one step. Shapes and limits are the caller's duty, so a violation is a bug and asserted."""
        assert 0 < len(batch.requests) <= self.limits.max_batch_size
        assert batch.num_tokens <= self.limits.max_num_tokens
        assert batch.num_draft_tokens <= self.limits.max_draft_len
        num_drafts = max(batch.num_draft_tokens, 1) if self._spec.has_drafts else 0
        is_decode = all(len(request.token_ids) == num_drafts + 1 for request in batch.requests)
        requests = self._padded(batch.requests, num_drafts) if is_decode else batch.requests
        inputs = step_inputs(StepBatch(requests=requests, num_draft_tokens=num_drafts))
        if is_decode:
            inputs = replace(inputs, page_table=self._full_width(inputs.page_table))
        with self._on_stream():
            shapes = self._buffers.fill(inputs)
            self._run(shapes, is_decode=is_decode)
            outputs = self._buffers.read(num_requests=len(requests), width=num_drafts + 1)
        last = _DecodeStep(
            num_real=len(batch.requests), num_requests=len(requests), width=num_drafts + 1, shapes=shapes
        )
        self._last = last if is_decode else None
        return _result(outputs, num_requests=len(batch.requests), has_drafts=batch.num_draft_tokens > 0)

    @torch.inference_mode()
    def follow(self) -> StepResult:
        """Repeat the last step, which was of verify blocks only, on its own outputs, without the host in between.

        Every request verifies all K drafts; the caller has made sure that its pages reach that far.
        """
        assert self._last is not None, "the last step was not of verify blocks only"
        last = self._last
        assert last.width > 1, "a step without drafts has nothing to hand over"
        with self._on_stream():
            self._buffers.advance(num_requests=last.num_requests, width=last.width)
            self._run(last.shapes, is_decode=True)
            outputs = self._buffers.read(num_requests=last.num_requests, width=last.width)
        return _result(outputs, num_requests=last.num_real, has_drafts=True)

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

    def _run(self, shapes: Shapes, *, is_decode: bool) -> None:
        context = self._contexts[DECODE if is_decode else MIXED]
        context.run(shapes, written=self._written, use_graph=is_decode and self._buffers.device.type == "cuda")
        if not self._is_in_place:
            self._buffers.state, self._written = self._written, self._buffers.state

    def _padded(self, requests: tuple[ScheduledRequest, ...], num_drafts: int) -> tuple[ScheduledRequest, ...]:
        """Up to the next power of two with requests that read and write the scratch page, for fewer graphs."""
        bucket = min(1 << (len(requests) - 1).bit_length(), self.limits.max_batch_size)
        if bucket * (num_drafts + 1) > self.limits.max_num_tokens:
            return requests
        num_pages = -(-(num_drafts + 1) // self.limits.page_size)
        dummy = ScheduledRequest(
            request_id="padding",
            token_ids=(0,) * (num_drafts + 1),
            context_len=0,
            num_candidates=num_drafts,
            page_ids=(self._buffers.scratch_page,) * num_pages,
            sampling=StepSampling(),
        )
        return requests + (dummy,) * (bucket - len(requests))

    def _full_width(self, page_table: Tensor) -> Tensor:
        """P at its largest, so that a growing sequence does not change the shape; the filling is never read."""
        most = -(-self.limits.max_seq_len // self.limits.page_size)
        wide = torch.full((len(page_table), most), self._buffers.scratch_page, dtype=page_table.dtype)
        wide[:, : page_table.shape[1]] = page_table
        return wide

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


def _result(outputs: dict[str, Tensor], *, num_requests: int, has_drafts: bool) -> StepResult:
    """Without the padding requests, which come last."""
    real = {name: tensor[:num_requests] for name, tensor in outputs.items()}
    num_accepted = real["num_accepted"]
    acceptance = Acceptance(
        emitted_tokens=real["emitted_tokens"],
        emitted_logprobs=real["emitted_logprobs"],
        num_accepted=num_accepted,
        bonus_tokens=real["emitted_tokens"].gather(1, num_accepted.long()[:, None])[:, 0],
        next_context_lens=real["next_context_lens"],
    )
    return step_result(StepOutputs(acceptance=acceptance, draft_tokens=real["draft_tokens"] if has_drafts else None))
