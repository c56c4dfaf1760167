"""The torch executor on a GPU: our kernels, CUDA graphs for verify blocks, no word between host and device in a step.

A step is one copy in, one graph (or, with a prefill chunk, the same launches one by one), one copy out. On a CPU it
runs in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_trt.core.batch import ExecutorLimits, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.core.errors import ConfigError, problem
from dflash_trt.core.packed_spec import engine_table
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.executor.cuda_graphs import CudaCapture, GraphCache
from dflash_trt.executor.page_budget import PagePlan, plan_engine_pages
from dflash_trt.executor.torch_executor import bind_network, check_batch, page_pool
from dflash_trt.executor.torch_gpu_staging import InputStaging, ResultStaging, StepShape, decode_shapes, step_shape
from dflash_trt.kernels.sampling_launch import advance
from dflash_trt.network.decoder import forward_target, logits_of
from dflash_trt.network.ops import Linear, StepState
from dflash_trt.network.step import Network, run_step
from dflash_trt.network.torch_gpu_linear import prepare_device_linear
from dflash_trt.network.torch_gpu_ops import GpuResources, TorchGpuOps
from dflash_trt.network.torch_packed import split_packed
from dflash_trt.network.weights import map_linears

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir

FREE_MEMORY_FRACTION = 0.8  # of what is free after loading; the rest is for activations of prefill steps


class TorchGpuExecutor:
    """Implements `core.batch.StepExecutor`. Owns pages and staging memory; weights must be on `device` already."""

    def __init__(
        self,
        network: Network[Tensor],
        *,
        page_plan: PagePlan,
        max_batch_size: int,
        max_num_tokens: int,
        max_draft_len: int,
        device: torch.device,
        quantization: QuantizationSpec | None = None,
    ) -> None:
        quantization = quantization or QuantizationSpec()
        self.page_plan = page_plan
        self.network = _prepared(network)
        self.limits = ExecutorLimits(
            max_batch_size=max_batch_size,
            max_seq_len=page_plan.max_seq_len,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len if network.draft else 0,
            page_size=page_plan.page_size,
            num_pages=page_plan.num_pages,
        )
        dtype = network.target_weights.embedding.dtype  # of activations and pages too
        decoders = [network.target, *([network.draft] if network.draft else [])]
        kv_scales = (quantization.target_kv, quantization.draft_kv)
        pools = [
            page_pool(decoder, network.mapping, page_plan, dtype if scales is None else torch.float8_e4m3fn, device)
            for decoder, scales in zip(decoders, kv_scales, strict=False)
        ]
        self._state = StepState(target_kv=pools[0], draft_kv=pools[1] if network.draft else ())
        page_scales = {
            id(pages): layer
            for pool, scales in zip(pools, kv_scales, strict=False)
            for pages, layer in zip(pool, scales or (), strict=False)
        }
        max_rows = max_batch_size * (self.limits.max_draft_len + 1)
        self._resources = GpuResources.allocate(
            network.target,
            network.draft,
            max_tokens=max(max_num_tokens, max_rows),
            max_rows=max_rows,
            page_scales=page_scales,
            dtype=dtype,
            device=device,
        )
        self._staging = InputStaging(self.limits, device)
        self._results = ResultStaging(self.limits, device)
        self._stream = _new_stream(device)
        self.graphs = GraphCache(None if self._stream is None else CudaCapture(self._stream))
        self._last: tuple[StepShape, int] | None = None  # of verify blocks with all their drafts: for `follow`

    @classmethod
    def open(
        cls,
        engine: EngineDir,
        *,
        use_drafter: bool = True,
        kv_cache_bytes: int | None = None,
        kv_cache_free_memory_fraction: float | None = None,
        device: torch.device | None = None,
    ) -> TorchGpuExecutor:
        """Load rank 0's weights to the GPU (the current one) and plan the pages in what it has free then.

        Raises:
            ConfigError, CapacityError: see `plan_engine_pages`.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        manifest = engine.manifest
        build, draft = manifest.build_config, manifest.draft if use_drafter else None
        quantization = manifest.pretrained_config.quantization or QuantizationSpec()
        table = engine_table(manifest.target, manifest.draft, quantization)
        plain, packed = split_packed(load_file(engine.weights_path(0), device=str(device)), table, quantization.linears)
        network = bind_network(manifest.target, draft, plain, packed)
        page_plan = plan_engine_pages(
            manifest,
            use_drafter=use_drafter,
            kv_cache_bytes=_page_bytes(kv_cache_bytes, kv_cache_free_memory_fraction, device),
        )
        executor = cls(
            network,
            page_plan=page_plan,
            max_batch_size=build.max_batch_size,
            max_num_tokens=build.max_num_tokens,
            max_draft_len=build.max_draft_len,
            device=device,
            quantization=quantization,
        )
        if device.type == "cuda":
            executor.warm_up()
        return executor

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepResult:
        """Run one step. Shapes and limits are the caller's duty, so a violation is a bug and asserted."""
        check_batch(batch, self.limits)
        shape = step_shape(batch, self.limits)
        self._staging.stage(batch, shape)
        with self.on_stream():
            self._staging.upload(shape)
            self._run(shape)
            self._results.download(shape)
        drafts_are_full = all(len(r.token_ids) == shape.width == r.num_candidates + 1 for r in batch.requests)
        self._last = (shape, len(batch.requests)) if shape.is_decode and drafts_are_full else None
        return self._results.read(shape, num_requests=len(batch.requests))

    @torch.inference_mode()
    def follow(self, num_steps: int = 1) -> StepResult:
        """Repeat the last step on its own outputs so many times, without the host in between; the last result.

        It was of verify blocks with all K drafts, and so are these. The caller has made sure that pages suffice.
        """
        assert self._last is not None and num_steps > 0, "the last step was not of full verify blocks"
        shape, num_requests = self._last
        assert shape.num_draft_tokens > 0, "a step without drafts has nothing to hand over"
        inputs, (outputs, drafts) = self._staging.inputs(shape), self._results.outputs(shape)
        blocks = (shape.num_requests, shape.width)
        with self.on_stream():
            for _ in range(num_steps):
                advance(
                    outputs,
                    drafts,
                    token_ids=inputs.token_ids.view(blocks),
                    positions=inputs.positions.view(blocks),
                    context_lens=inputs.context_lens,
                )
                self._run(shape)
            self._results.download(shape)
        return self._results.read(shape, num_requests=num_requests)

    @torch.inference_mode()
    def warm_up(self, shapes: Iterable[StepShape] | None = None) -> None:
        """Compile kernels and capture graphs ahead, by default for every bucket of requests at the full draft length.

        The steps consist of padding alone, which touches no page, so requests may be alive.
        """
        if shapes is None:
            shapes = decode_shapes(self.limits, num_draft_tokens=self.limits.max_draft_len)
        for shape in shapes:
            assert shape.is_decode
            for _ in range(2):  # run, capture
                self.wait()
                self._staging.stage(StepBatch(requests=(), num_draft_tokens=shape.num_draft_tokens), shape)
                with self.on_stream():
                    self._staging.upload(shape)
                    self._run(shape)
        self.wait()

    @torch.inference_mode()
    def enqueue(self, batch: StepBatch, *, times: int = 1) -> None:
        """Put one step on the stream so many times and read nothing back: for measuring the device alone."""
        check_batch(batch, self.limits)
        shape = step_shape(batch, self.limits)
        self.wait()
        self._staging.stage(batch, shape)
        with self.on_stream():
            self._staging.upload(shape)
            for _ in range(times):
                self._run(shape)

    @property
    def pages(self) -> list[Tensor]:
        """Of every layer, the target's first."""
        return [*self._state.target_kv, *self._state.draft_kv]

    def wait(self) -> None:
        """Until the device is done with everything."""
        if self._stream is not None:
            self._stream.synchronize()

    @torch.inference_mode()
    def target_logits(self, token_ids: Sequence[int]) -> Tensor:  # float [N, V]
        """The target's logits after every token of one sequence: for measuring, on an executor that serves nobody."""
        num_tokens = len(token_ids)
        assert 0 < num_tokens <= min(self.limits.max_seq_len, self.limits.max_num_tokens)
        request = ScheduledRequest(
            request_id="sequence",
            token_ids=tuple(token_ids),
            context_len=0,
            num_candidates=0,
            page_ids=tuple(range(-(-num_tokens // self.limits.page_size))),
            sampling=StepSampling(),
        )
        batch = StepBatch(requests=(request,), num_draft_tokens=0)
        shape = StepShape(num_requests=1, num_tokens=num_tokens, num_draft_tokens=0, is_decode=False)
        self._staging.stage(batch, shape)
        network = self.network
        with self.on_stream():
            self._staging.upload(shape)
            inputs = self._staging.inputs(shape)
            ops: Any = TorchGpuOps(inputs, self._resources, num_draft_tokens=0)
            hidden = forward_target(
                ops,
                network.target,
                network.target_weights,
                network.mapping,
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                kv_pages=self._state.target_kv,
                tap_layer_ids=(),
            )
            logits: Tensor = logits_of(ops, network.target_weights, network.target, hidden.last)
            return logits.cpu()

    def _run(self, shape: StepShape) -> None:
        if shape.is_decode:
            self.graphs.run(shape, partial(self._enqueue, shape))
        else:
            self._enqueue(shape)

    def _enqueue(self, shape: StepShape) -> None:
        """The launches of a step; what a CUDA graph holds."""
        inputs, (outputs, drafts) = self._staging.inputs(shape), self._results.outputs(shape)
        ops: Any = TorchGpuOps(inputs, self._resources, num_draft_tokens=shape.num_draft_tokens, outputs=outputs)
        result = run_step(ops, self.network, inputs, self._state, num_draft_tokens=shape.num_draft_tokens)
        if result.draft_tokens is not None:
            drafts.copy_(result.draft_tokens)

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Where the steps run."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _prepared(network: Network[Tensor]) -> Network[Tensor]:
    dtype = network.target_weights.embedding.dtype

    def prepare(linear: Linear[Tensor]) -> Linear[Tensor]:
        return prepare_device_linear(linear, dtype)

    return replace(
        network,
        target_weights=map_linears(network.target_weights, prepare),
        draft_weights=map_linears(network.draft_weights, prepare),
    )


def _new_stream(device: torch.device) -> Any:
    """None on a CPU. Weights and pages were made on another stream, so they are waited for here, once."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    make_stream: Any = torch.cuda.Stream  # untyped in PyTorch
    return make_stream(device)


def _page_bytes(kv_cache_bytes: int | None, fraction: float | None, device: torch.device) -> int:
    """Bytes for pages on this device, with the weights loaded.

    Raises:
        ConfigError: both are given, or the fraction is not in (0, 1].
    """
    if fraction is not None and (kv_cache_bytes is not None or not 0 < fraction <= 1):
        raise ConfigError(
            problem(
                "kv_cache_free_memory_fraction",
                expected="a number in (0, 1], or kv_cache_bytes instead of it",
                found=str(fraction),
                mend="Pass one of the two.",
            )
        )
    if kv_cache_bytes is not None:
        return kv_cache_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * (fraction or FREE_MEMORY_FRACTION))
