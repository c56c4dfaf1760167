"""The op façade over the GPU kernels: a step is a fixed sequence of launches that never waits for the host.

Handles are tensors, or work put off until the kernel that does it along the way: heads to be normed and rotated where
they are attended, sums to be added where they are normed, norms and gates to be rounded as the next GEMM wants them.
The one exception: without a grouped GEMM, a prefill step of a target with experts asks which are chosen.
One `TorchGpuOps` lives for one step; everything that outlives it is in `GpuResources`. Runs on a CPU under Triton's
interpreter, in float32, for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.linear import Plain, apply_device_linear
from dflash_trt.backends.torch.moe import (
    chosen_experts,
    has_grouped_gemm,
    run_all_experts,
    run_chosen_experts,
    run_grouped_experts,
)
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.core.model_spec import AttentionSpec, DecoderSpec, DraftSpec, MoeSpec, Rotary, TargetSpec
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.kernels import attention_launch, sampling_launch
from dflash_trt.kernels.argmax_launch import argmax_tokens
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors
from dflash_trt.kernels.norm_launch import add_rms_norm, rms_norm, silu_mul
from dflash_trt.kernels.rope_and_pages_launch import (
    DraftLayers,
    Rotation,
    rotate_and_store,
    rotate_block,
    store_draft_context,
)
from dflash_trt.kernels.sampling_launch import SamplingInputs, SamplingOutputs
from dflash_trt.network.ops import Acceptance, Cache, DraftBlock, Experts, Linear, StackedExperts, StepInputs
from dflash_trt.network.rope import rope_frequencies


@dataclass(frozen=True, slots=True)
class RopeRows:
    """A decoder's rotation and the rows' positions, int32 [N]."""

    inv_freq: Tensor  # float32 [D / 2]
    amplitude: float
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """[N, heads, D] before its norm and rotation; rows may be further apart."""

    x: Tensor
    norm: tuple[Tensor, float] | None = None  # weight [D], eps
    rope: RopeRows | None = None


@dataclass(slots=True)
class Sum:
    """a + b, computed by the norm that follows or by whoever needs it first."""

    a: Tensor
    b: Tensor
    total: Tensor | None = field(default=None)

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.a + self.b
        return self.total


@dataclass(slots=True)
class Norm:
    """An Activation: the RMS norm of `source`, with the addition before it when that is still to be done."""

    source: Tensor | Sum
    weight: Tensor
    eps: float
    normed: Tensor | None = field(default=None)

    def value(self) -> Tensor:
        if self.normed is None:
            self.normed = self._run(None)
        return self.normed

    def codes(self, scale: Tensor) -> Tensor:
        return self._run(scale)

    def _run(self, scale: Tensor | None) -> Tensor:
        source = self.source
        if isinstance(source, Sum) and source.total is None:
            source.total, normed = add_rms_norm(source.a, source.b, self.weight, self.eps, scale=scale)
            return normed
        return rms_norm(_tensor(source), self.weight, self.eps, scale=scale)


@dataclass(frozen=True, slots=True)
class Gated:
    """An Activation: silu(gate) * up. Read once."""

    gate_up: Tensor

    def value(self) -> Tensor:
        return silu_mul(self.gate_up)

    def codes(self, scale: Tensor) -> Tensor:
        return silu_mul(self.gate_up, scale=scale)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The draft context of one layer. The first one's write is that of all layers, in one launch."""

    kv: Tensor  # of all layers
    layer: int
    rope: RopeRows
    eps: float


Value = Tensor | Heads | Sum | Norm | Gated


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuResources:
    """What one engine keeps on its device beside weights and pages."""

    rope: Mapping[Rotary, tuple[Tensor, float]]  # inv_freq float32 [D / 2], amplitude
    attention_workspace: Tensor
    attended: Tensor  # flat; kept from step to step so that rows of no request always hold finite numbers
    sampling_workspace: Mapping[str, Tensor]
    draft_layers: DraftLayers | None  # their k_norms and pages

    @classmethod
    def allocate(
        cls,
        target: TargetSpec,
        draft: DraftSpec | None,
        *,
        tp_size: int = 1,
        max_tokens: int,
        max_rows: int,  # max_batch_size * (max_draft_len + 1)
        draft_layers: DraftLayers | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "GpuResources":
        decoders: list[DecoderSpec] = [target] + ([draft] if draft else [])
        frequencies = {decoder.rotary: rope_frequencies(decoder.rotary) for decoder in decoders}
        workspaces = [
            attention_launch.allocate_workspace(
                kv_heads=decoder.num_kv_heads // tp_size, head_dim=decoder.head_dim, device=device
            )
            for decoder in decoders
        ]
        return cls(
            rope={rotary: (torch.tensor(f.inv_freq, device=device), f.amplitude) for rotary, f in frequencies.items()},
            attention_workspace=max(workspaces, key=len),
            attended=torch.zeros(max_tokens * target.q_size // tp_size, dtype=dtype, device=device),
            sampling_workspace=sampling_launch.allocate_workspace(max_rows, target.vocab_size, device),
            draft_layers=draft_layers,
        )


class TorchGpuOps:
    """Implements `Ops[Value]` for one step; `run_step` may treat the handles as tensors."""

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        resources: GpuResources,
        *,
        num_draft_tokens: int,
        outputs: SamplingOutputs | None = None,
        ranks: RankGroup = ONE_RANK,
        may_ask_host: bool = False,
    ) -> None:
        """`outputs` is where sampling writes, when the caller wants it at a fixed place. A step that is never captured
        in a graph `may_ask_host` which experts are chosen, where the device cannot go on without.
        """
        self._inputs = inputs
        self._resources = resources
        self._num_draft_tokens = num_draft_tokens
        self._outputs = outputs
        self._ranks = ranks
        self._may_ask_host = may_ask_host
        self._requests = RequestTensors(
            token_offsets=inputs.token_offsets, context_lens=inputs.context_lens, page_table=inputs.page_table
        )

    def embedding(self, table: Value, token_ids: Value) -> Tensor:
        return F.embedding(_tensor(token_ids), _tensor(table))

    def linear(self, x: Value, linear: Linear[Any]) -> Tensor:
        activation = x if isinstance(x, Norm | Gated) else Plain(_tensor(x))
        return apply_device_linear(activation, linear)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        if isinstance(x, Heads):
            assert x.norm is None and x.rope is None
            return Heads(x.x, norm=(_tensor(weight), eps))
        return Norm(x if isinstance(x, Sum) else _tensor(x), _tensor(weight), eps)

    def add(self, a: Value, b: Value) -> Sum:
        return Sum(_tensor(a), _tensor(b))

    def scale(self, x: Value, factor: float) -> Tensor:
        return _tensor(x) if factor == 1.0 else _tensor(x) * factor

    def silu_mul(self, gate_up: Value) -> Gated:
        return Gated(_tensor(gate_up))

    def moe(self, x: Value, experts: Experts[Any], moe: MoeSpec) -> Tensor:
        assert isinstance(experts, StackedExperts)
        choice = chosen_experts(self.linear(x, experts.router), moe)
        rows = _tensor(x)
        if has_grouped_gemm(rows):
            return run_grouped_experts(rows, experts, moe, choice)
        run_experts = run_chosen_experts if self._may_ask_host else run_all_experts
        return run_experts(rows, experts, moe, choice)

    def split(self, x: Value, sizes: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(_tensor(x), list(sizes), dim=-1)

    def concat(self, xs: Sequence[Value]) -> Tensor:
        return torch.cat([_tensor(x) for x in xs], dim=-1)

    def split_heads(self, x: Value, head_dim: int) -> Heads:
        x = _tensor(x)
        return Heads(x.view(len(x), -1, head_dim))

    def gather_rows(self, x: Value, rows: Value) -> Tensor:
        return _tensor(x).index_select(0, _tensor(rows).flatten())

    def rope_table(self, rotary: Rotary, positions: Value) -> RopeRows:
        inv_freq, amplitude = self._resources.rope[rotary]
        return RopeRows(inv_freq, amplitude, _tensor(positions))

    def rope(self, x: Value, table: RopeRows) -> Heads:
        assert isinstance(x, Heads) and x.rope is None
        return replace(x, rope=table)

    def attend_pages(
        self, q: Value, k: Value, v: Value, cache: Cache[Any], attention: AttentionSpec, sinks: Value | None
    ) -> Tensor:
        assert isinstance(q, Heads) and isinstance(k, Heads) and isinstance(v, Heads)
        pool, options = cache.tensor, _options(cache, attention, sinks)
        rotated = rotate_and_store(
            q.x,
            k.x,
            v.x,
            pool,
            self._requests,
            self._inputs.positions,
            _rotation(q, k),
            k_scale=options.k_scale,
            v_scale=options.v_scale,
        )
        assert rotated is not None
        attended = attention_launch.attend_pages(
            rotated,
            pool,
            self._requests,
            options,
            workspace=self._resources.attention_workspace,
            num_verify_rows=self._num_draft_tokens + 1,
            attended=self._resources.attended[: rotated.numel()].view(rotated.shape),
        )
        return attended.view(len(attended), -1)

    def draft_context(
        self, kv: Value, spec: DraftSpec, k_norms: Sequence[Value | None], rope: RopeRows
    ) -> list[LayerContext]:
        return [LayerContext(_tensor(kv), layer, rope, spec.rms_norm_eps) for layer in range(len(k_norms))]

    def attend_draft(
        self,
        context: LayerContext,
        q: Value,
        block: tuple[Value, Value],
        cache: Cache[Any],
        acceptance: Acceptance[Any],
        attention: AttentionSpec,
    ) -> Tensor:
        k, v = block
        assert isinstance(q, Heads) and isinstance(k, Heads) and isinstance(v, Heads) and k.rope is not None
        self.write_draft_context(context, cache, acceptance)
        q_rows, k_rows = rotate_block(q.x, k.x, k.rope.positions, _rotation(q, k))
        attended = attention_launch.attend_draft(
            q_rows,
            (k_rows, v.x),
            cache.tensor,
            replace(self._requests, context_lens=acceptance.next_context_lens),
            _options(cache, attention),
            workspace=self._resources.attention_workspace,
        )
        return attended.view(len(attended), -1)

    def write_draft_context(self, context: LayerContext, cache: Cache[Any], acceptance: Acceptance[Any]) -> None:
        if context.layer > 0:
            return
        layers = self._resources.draft_layers
        assert layers is not None and layers.first_pages is cache.tensor, "the layers come in their order"
        store_draft_context(
            context.kv,
            layers,
            replace(self._requests, context_lens=acceptance.next_context_lens),
            context.rope.positions,
            Rotation(inv_freq=context.rope.inv_freq, amplitude=context.rope.amplitude, eps=context.eps),
        )

    def sample_and_accept(self, logits: Value) -> Acceptance[Any]:
        inputs, scores = self._inputs, _tensor(logits)
        num_requests, width = inputs.logit_rows.shape
        outputs = self._outputs or sampling_launch.allocate_outputs(num_requests, width, scores.device)
        sampling_launch.sample_and_accept(
            scores,
            SamplingInputs(**{name: getattr(inputs, name) for name in SamplingInputs.__dataclass_fields__}),
            outputs,
            self._resources.sampling_workspace,
        )
        return Acceptance(**{name: getattr(outputs, name) for name in SamplingOutputs.__dataclass_fields__})

    def draft_block(self, acceptance: Acceptance[Any], *, mask_token_id: int) -> DraftBlock[Any]:
        shape = (len(acceptance.bonus_tokens), self._num_draft_tokens + 1)
        token_ids, positions = (torch.empty(shape, dtype=torch.int32, device=self._device) for _ in range(2))
        sampling_launch.draft_block(
            acceptance.bonus_tokens,
            acceptance.next_context_lens,
            token_ids,
            positions,
            mask_token_id=mask_token_id,
        )
        return DraftBlock(token_ids=token_ids.flatten(), positions=positions.flatten())

    def draft_slots(self, hidden: Value) -> Tensor:
        x = _tensor(hidden)
        blocks = x.view(-1, self._num_draft_tokens + 1, x.shape[-1])
        return blocks[:, 1:].reshape(-1, x.shape[-1])

    def argmax_tokens(self, logits: Value) -> Tensor:
        return argmax_tokens(_tensor(logits)).view(-1, self._num_draft_tokens)

    def map_tokens(self, draft_to_target: Value, token_ids: Value) -> Tensor:
        tokens = _tensor(token_ids)
        return _tensor(draft_to_target).index_select(0, tokens.flatten()).view(tokens.shape).int()

    def all_reduce(self, x: Value) -> Tensor:
        return self._ranks.all_reduce(_tensor(x))

    def all_gather_vocab(self, logits: Value) -> Tensor:
        return self._ranks.all_gather_columns(_tensor(logits))

    @property
    def _device(self) -> torch.device:
        return self._inputs.token_ids.device


def _options(cache: Cache[Any], attention: AttentionSpec, sinks: Value | None = None) -> AttentionOptions:
    scales = cache.spec.scales or LayerKvScales()
    return AttentionOptions(
        window=attention.window,
        is_causal=attention.is_causal,
        is_window_anchored=attention.is_window_anchored,
        sinks=None if sinks is None else _tensor(sinks).float(),
        k_scale=scales.k,
        v_scale=scales.v,
    )


def _tensor(x: Value) -> Tensor:
    assert not isinstance(x, Heads), "heads are read by attention alone"
    return x if isinstance(x, Tensor) else x.value()


def _rotation(q: Heads, k: Heads) -> Rotation:
    assert k.rope is not None and (q.norm is None) == (k.norm is None)
    eps = 1e-6 if k.norm is None else k.norm[1]
    return Rotation(
        inv_freq=k.rope.inv_freq,
        amplitude=k.rope.amplitude,
        q_norm=None if q.norm is None else q.norm[0],
        k_norm=None if k.norm is None else k.norm[0],
        eps=eps,
    )
