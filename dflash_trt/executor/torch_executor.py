"""The torch executor: the step run eagerly by PyTorch, the default on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_trt.core.batch import ExecutorLimits, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec
from dflash_trt.core.packed_spec import engine_table
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.executor.page_budget import PagePlan, plan_engine_pages
from dflash_trt.executor.step_inputs import step_inputs, step_result
from dflash_trt.network.decoder import forward_target, logits_of
from dflash_trt.network.ops import Linear, StepState
from dflash_trt.network.step import Network, run_step
from dflash_trt.network.torch_ops import TorchOps, make_rope_table
from dflash_trt.network.torch_packed import PackedWeight, prepare_linear, split_packed
from dflash_trt.network.weights import bind_draft, bind_target, map_linears

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir


class TorchExecutor:
    """Implements `core.batch.StepExecutor`. Owns the pages; knows nothing of requests beyond one step."""

    def __init__(
        self,
        network: Network[Tensor],
        *,
        page_plan: PagePlan,
        max_batch_size: int,
        max_num_tokens: int,
        max_draft_len: int,
        quantization: QuantizationSpec | None = None,
    ) -> None:
        """`quantization` says which pages are FP8; packed weights are in the network already."""
        quantization = quantization or QuantizationSpec()
        self.page_plan = page_plan
        self.network = _packed(network)
        self.limits = ExecutorLimits(
            max_batch_size=max_batch_size,
            max_seq_len=page_plan.max_seq_len,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len if network.draft else 0,
            page_size=page_plan.page_size,
            num_pages=page_plan.num_pages,
        )
        dtype = network.target_weights.embedding.dtype  # of activations and pages too
        decoders: list[DecoderSpec] = [network.target] + ([network.draft] if network.draft else [])
        num_positions = page_plan.max_seq_len + self.limits.max_draft_len + 1  # a draft block may reach past the end
        self._rope_tables = [
            (decoder, make_rope_table(decoder, num_positions=num_positions, dtype=dtype)) for decoder in decoders
        ]
        kv_scales = (quantization.target_kv, quantization.draft_kv)
        pools = [
            page_pool(decoder, network.mapping, page_plan, dtype if scales is None else torch.float8_e4m3fn)
            for decoder, scales in zip(decoders, kv_scales, strict=False)
        ]
        self._state = StepState(target_kv=pools[0], draft_kv=pools[1] if network.draft else ())
        self._page_scales = {
            id(pages): layer
            for pool, scales in zip(pools, kv_scales, strict=False)
            for pages, layer in zip(pool, scales or (), strict=False)
        }

    @classmethod
    def open(
        cls,
        engine: EngineDir,
        *,
        use_drafter: bool = True,
        kv_cache_bytes: int | None = None,
        kv_cache_free_memory_fraction: float | None = None,
        num_threads: int | None = None,
    ) -> TorchExecutor:
        """Load rank 0's weights and plan the pages.

        `num_threads` sets PyTorch's intra-op threads for the whole process. Pages are touched, and so cost memory,
        only when a request reaches them.

        Raises:
            ConfigError, CapacityError: see `plan_engine_pages`.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        manifest = engine.manifest
        tensors = load_file(engine.weights_path(0))
        draft = manifest.draft if use_drafter else None
        quantization = manifest.pretrained_config.quantization or QuantizationSpec()
        table = engine_table(manifest.target, manifest.draft, quantization)
        plain, packed = split_packed(tensors, table, quantization.linears)
        network = bind_network(manifest.target, draft, plain, packed)
        build = manifest.build_config
        page_plan = plan_engine_pages(
            manifest,
            use_drafter=use_drafter,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_free_memory_fraction=kv_cache_free_memory_fraction,
        )
        return cls(
            network,
            page_plan=page_plan,
            max_batch_size=build.max_batch_size,
            max_num_tokens=build.max_num_tokens,
            max_draft_len=build.max_draft_len,
            quantization=quantization,
        )

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepResult:
        """Run one step. Shapes and limits are the caller's duty, so a violation is a bug and asserted."""
        check_batch(batch, self.limits)
        inputs = step_inputs(batch)
        ops = TorchOps(
            inputs,
            self._rope_tables,
            page_size=self.limits.page_size,
            num_draft_tokens=batch.num_draft_tokens,
            page_scales=self._page_scales,
        )
        outputs = run_step(ops, self.network, inputs, self._state, num_draft_tokens=batch.num_draft_tokens)
        return step_result(outputs)

    @torch.inference_mode()
    def target_logits(self, token_ids: Sequence[int]) -> Tensor:  # float [N, V]
        """The target's logits after every token of one sequence: for measuring, on an executor that serves nobody."""
        num_tokens = len(token_ids)
        assert 0 < num_tokens <= self.limits.max_seq_len
        request = ScheduledRequest(
            request_id="sequence",
            token_ids=tuple(token_ids),
            context_len=0,
            num_candidates=0,
            page_ids=tuple(range(-(-num_tokens // self.limits.page_size))),
            sampling=StepSampling(),
        )
        inputs = step_inputs(StepBatch(requests=(request,), num_draft_tokens=0))
        ops = TorchOps(
            inputs,
            self._rope_tables,
            page_size=self.limits.page_size,
            num_draft_tokens=0,
            page_scales=self._page_scales,
        )
        network = self.network
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
        return logits_of(ops, network.target_weights, network.target, hidden.last)


def check_batch(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Assert what the scheduler guarantees."""
    assert 0 < len(batch.requests) <= limits.max_batch_size
    assert batch.num_tokens <= limits.max_num_tokens
    assert batch.num_draft_tokens <= limits.max_draft_len
    for request in batch.requests:
        end = request.context_len + len(request.token_ids)
        assert request.token_ids and end <= limits.max_seq_len
        assert end <= len(request.page_ids) * limits.page_size
        assert request.num_candidates <= min(batch.num_draft_tokens, len(request.token_ids) - 1)


def bind_network(
    target: TargetSpec,
    draft: DraftSpec | None,
    tensors: dict[str, Tensor],
    packed: dict[str, PackedWeight[Tensor]] | None = None,
) -> Network[Tensor]:
    """Canonical tensors of one rank, and its packed linears -> the network; slices are views."""
    target_weights = bind_target(target, tensors, packed)
    draft_weights = None
    if draft is not None:
        draft_weights = bind_draft(
            draft, target_weights, tensors, Mapping(), slice_rows=lambda x, start, stop: x[start:stop], packed=packed
        )
    return Network(
        target=target, target_weights=target_weights, draft=draft, draft_weights=draft_weights, mapping=Mapping()
    )


def _packed(network: Network[Tensor]) -> Network[Tensor]:
    """Linear weights in the layout the CPU computes with."""
    dtype = network.target_weights.embedding.dtype

    def prepare(linear: Linear[Tensor]) -> Linear[Tensor]:
        return prepare_linear(linear, dtype)

    return replace(
        network,
        target_weights=map_linears(network.target_weights, prepare),
        draft_weights=map_linears(network.draft_weights, prepare),
    )


def page_pool(
    decoder: DecoderSpec, mapping: Mapping, plan: PagePlan, dtype: torch.dtype, device: torch.device | None = None
) -> list[Tensor]:
    """Per layer [pages, 2, page_size, kv_heads, D], views into one allocation; on the CPU unless told."""
    kv_heads = decoder.num_kv_heads // mapping.tp_size
    shape = (decoder.num_layers, plan.num_pages, 2, plan.page_size, kv_heads, decoder.head_dim)
    return list(torch.zeros(shape, dtype=dtype, device=device).unbind(0))
