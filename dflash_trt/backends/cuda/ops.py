"""The op façade over the GPU kernels: a step is a fixed sequence of launches that never waits for the host.

Handles are tensors, or work put off until the kernel that does it along the way: heads to be normed and rotated where
they are attended, sums to be added where they are normed, norms and gates to be rounded as the next GEMM wants them.
One `TorchGpuOps` lives for one step; everything that outlives it is in `GpuResources`. Runs on a CPU under Triton's
interpreter, in float32, for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.experts import DeviceExperts, run_device_experts
from dflash_trt.backends.cuda.linear import Plain, apply_device_linear
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.core.mapping import Mapping as RankMapping
from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.kernels import attention_launch, sampling_launch
from dflash_trt.kernels.argmax_launch import draft_tokens
from dflash_trt.kernels.attention_launch import AttentionOptions
from dflash_trt.kernels.attention_plan import AttentionPlans, RequestTensors
from dflash_trt.kernels.norm_launch import add_rms_norm, rms_norm, silu_mul
from dflash_trt.kernels.one_shot_launch import PeerBuffers, one_shot_add_rms_norm, one_shot_sum
from dflash_trt.kernels.rope_and_pages_launch import (
    DraftLayers,
    Rotation,
    rotate_and_store,
    rotate_block,
    store_draft_context,
)
from dflash_trt.kernels.row_codes_launch import RowCodes
from dflash_trt.kernels.sampling_launch import SamplingInputs, SamplingOutputs
from dflash_trt.network.ops import Acceptance, Cache, Experts, KvDestination, Linear, Rows, StepInputs, TokenBlocks
from dflash_trt.network.rope import rope_frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsIndex:
    """Requests of some rows, and the plans of attention that their layers share."""

    requests: RequestTensors
    plans: AttentionPlans = field(default_factory=AttentionPlans)


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


@dataclass(frozen=True, slots=True)
class RankSum:
    """The sum of what the ranks have, through memory that they share; computed by the norm that follows or on its own.

    Read once, and by every rank in the same way.
    """

    x: Tensor
    peers: PeerBuffers

    def value(self) -> Tensor:
        return one_shot_sum(self.x, self.peers)


@dataclass(slots=True)
class Sum:
    """a + b, computed by the norm that follows or by whoever needs it first."""

    a: Tensor
    b: Tensor | RankSum
    total: Tensor | None = field(default=None)

    def value(self) -> Tensor:
        if self.total is None:
            self.total = self.a + _tensor(self.b)
        return self.total

    def add_and_norm(self, weight: Tensor, eps: float, codes: RowCodes | None) -> Tensor:
        if isinstance(self.b, RankSum):
            b = self.b
            self.total, normed = one_shot_add_rms_norm(b.x, self.a, weight, eps, b.peers, codes=codes)
        else:
            self.total, normed = add_rms_norm(self.a, self.b, weight, eps, codes=codes)
        return normed


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

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        rows = self.source.a if isinstance(self.source, Sum) else self.source
        codes = RowCodes.allocate(form, scale, *rows.shape)
        self._run(codes)
        return codes

    def _run(self, codes: RowCodes | None) -> Tensor:
        source = self.source
        if isinstance(source, Sum) and source.total is None:
            return source.add_and_norm(self.weight, self.eps, codes)
        return rms_norm(_tensor(source), self.weight, self.eps, codes=codes)


@dataclass(frozen=True, slots=True)
class Gated:
    """An Activation: silu(gate) * up. Read once."""

    gate_up: Tensor

    def value(self) -> Tensor:
        return silu_mul(self.gate_up)

    def codes(self, form: int, scale: Tensor) -> RowCodes:
        num_rows, num_columns = self.gate_up.shape
        codes = RowCodes.allocate(form, scale, num_rows, num_columns // 2)
        silu_mul(self.gate_up, codes=codes)
        return codes


Value = Tensor | Heads | RankSum | Sum | Norm | Gated


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuResources:
    """Memory of an engine on its device, apart from weights and pages."""

    rope: Mapping[Rotary, tuple[Tensor, float]]  # inv_freq float32 [D / 2], amplitude
    attention_workspace: Tensor
    attended: Tensor  # flat; kept from step to step so that rows of no request always hold finite numbers
    sampling_workspace: Mapping[str, Tensor]
    draft_layers: DraftLayers | None  # their k_norms and pages
    peers: PeerBuffers | None = None  # for sums of few rows over ranks

    @classmethod
    def allocate(
        cls,
        target: TargetSpec,
        draft: DraftSpec | None,
        *,
        mapping: RankMapping,
        max_tokens: int,
        max_rows: int,  # max_batch_size * (max_draft_len + 1)
        draft_layers: DraftLayers | None,
        dtype: torch.dtype,
        device: torch.device,
        peers: PeerBuffers | None = None,
    ) -> "GpuResources":
        decoders: list[DecoderSpec] = [target] + ([draft] if draft else [])
        mixers = {layer.mixer.shard(mapping) for decoder in decoders for layer in decoder.layers}
        frequencies = {mixer.rotary: rope_frequencies(mixer.rotary) for mixer in mixers}
        workspaces = [
            attention_launch.allocate_workspace(kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim, device=device)
            for mixer in mixers
        ]
        most_features = max(layer.mixer.shard(mapping).q_size for layer in target.layers)
        return cls(
            rope={rotary: (torch.tensor(f.inv_freq, device=device), f.amplitude) for rotary, f in frequencies.items()},
            attention_workspace=max(workspaces, key=len),
            attended=torch.zeros(max_tokens * most_features, dtype=dtype, device=device),
            sampling_workspace=sampling_launch.allocate_workspace(max_rows, target.vocab_size, device),
            draft_layers=draft_layers,
            peers=peers,
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
    ) -> None:
        """`outputs` is where sampling writes, when the caller wants it at a fixed place."""
        self._inputs = inputs
        self._resources = resources
        self._num_draft_tokens = num_draft_tokens
        self._outputs = outputs
        self._ranks = ranks

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
        return Sum(_tensor(a), b if isinstance(b, RankSum) else _tensor(b))

    def scale(self, x: Value, factor: float) -> Tensor:
        return _tensor(x) if factor == 1.0 else _tensor(x) * factor

    def silu_mul(self, gate_up: Value) -> Gated:
        return Gated(_tensor(gate_up))

    def moe(self, x: Value, experts: Experts[Any], moe: Moe) -> Tensor:
        assert isinstance(experts, DeviceExperts)
        return run_device_experts(_tensor(x), self.linear(x, experts.router), experts, moe)

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

    def token_rows(self) -> Rows[Any]:
        inputs = self._inputs
        return _rows(inputs.positions, inputs.token_offsets, inputs.context_lens, inputs.page_table, keeps_kv=True)

    def attend(
        self, q: Value, k: Value, v: Value, rows: Rows[Any], cache: Cache[Any], gqa: Gqa, sinks: Value | None = None
    ) -> Tensor:
        assert isinstance(q, Heads) and isinstance(k, Heads) and isinstance(v, Heads)
        options = _options(cache, gqa, sinks)
        attended = self._attend_rows if rows.keeps_kv else self._attend_blocks
        return attended(q, k, v, rows, cache.tensor, options).flatten(1)

    def _attend_rows(
        self, q: Heads, k: Heads, v: Heads, rows: Rows[Any], pool: Tensor, options: AttentionOptions
    ) -> Tensor:
        rotated = rotate_and_store(
            q.x,
            k.x,
            v.x,
            pool,
            rows.index.requests,
            rows.positions,
            _rotation(q, k),
            k_scale=options.k_scale,
            v_scale=options.v_scale,
        )
        assert rotated is not None
        return attention_launch.attend_pages(
            rotated,
            pool,
            rows.index.requests,
            options,
            workspace=self._resources.attention_workspace,
            plans=rows.index.plans,
            num_verify_rows=self._num_draft_tokens + 1,
            attended=self._resources.attended[: rotated.numel()].view(rotated.shape),
        )

    def _attend_blocks(
        self, q: Heads, k: Heads, v: Heads, rows: Rows[Any], pool: Tensor, options: AttentionOptions
    ) -> Tensor:
        q_rows, k_rows = rotate_block(q.x, k.x, rows.positions, _rotation(q, k))
        return attention_launch.attend_draft(
            q_rows,
            (k_rows, v.x),
            pool,
            rows.index.requests,
            options,
            workspace=self._resources.attention_workspace,
            plans=rows.index.plans,
        )

    def store_kv(self, kv: Value, layers: Sequence[KvDestination[Any]], rows: Rows[Any], limits: Value) -> None:
        """All layers in one launch, from what `GpuResources.draft_layers` has stacked of them."""
        stacked, (first, *others) = self._resources.draft_layers, layers
        assert stacked is not None and stacked.first_pages is first.cache.tensor
        assert len(others) + 1 == len(stacked.page_offsets) and all(other.rope is first.rope for other in others)
        store_draft_context(
            _tensor(kv),
            stacked,
            replace(rows.index.requests, context_lens=_tensor(limits)),
            rows.positions,
            Rotation(inv_freq=first.rope.inv_freq, amplitude=first.rope.amplitude, eps=first.eps),
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

    def token_blocks(self, acceptance: Acceptance[Any], *, fill: int) -> TokenBlocks[Any]:
        shape = (len(acceptance.bonus_tokens), self._num_draft_tokens + 1)
        token_ids, positions = (torch.empty(shape, dtype=torch.int32, device=self._device) for _ in range(2))
        starts, inputs = acceptance.next_context_lens, self._inputs
        sampling_launch.draft_block(acceptance.bonus_tokens, starts, token_ids, positions, mask_token_id=fill)
        rows = _rows(positions.flatten(), inputs.token_offsets, starts, inputs.page_table, keeps_kv=False)
        return TokenBlocks(token_ids=token_ids.flatten(), rows=rows)

    def without_first(self, hidden: Value) -> Tensor:
        x = _tensor(hidden)
        blocks = x.view(-1, self._num_draft_tokens + 1, x.shape[-1])
        return blocks[:, 1:].reshape(-1, x.shape[-1])

    def draft_tokens(self, logits: Value, acceptance: Acceptance[Any], draft_to_target: Value | None) -> Tensor:
        inputs, mapped = self._inputs, None if draft_to_target is None else _tensor(draft_to_target)
        return draft_tokens(_tensor(logits), inputs.temperature, inputs.seed, acceptance.next_context_lens, mapped)

    def all_reduce(self, x: Value) -> Tensor | RankSum:
        rows, peers = _tensor(x), self._resources.peers
        return RankSum(rows, peers) if peers is not None and peers.takes(rows) else self._ranks.all_reduce(rows)

    def all_gather_vocab(self, logits: Value) -> Tensor:
        return self._ranks.all_gather_columns(_tensor(logits))

    @property
    def _device(self) -> torch.device:
        return self._inputs.token_ids.device


def _rows(
    positions: Tensor, token_offsets: Tensor, context_lens: Tensor, page_table: Tensor, *, keeps_kv: bool
) -> Rows[Any]:
    """The offsets of blocks are read by no kernel; the step's are there in their place."""
    requests = RequestTensors(token_offsets=token_offsets, context_lens=context_lens, page_table=page_table)
    return Rows(
        positions=positions,
        token_offsets=token_offsets if keeps_kv else None,
        context_lens=context_lens,
        page_table=page_table,
        keeps_kv=keeps_kv,
        index=RowsIndex(requests=requests),
    )


def _options(cache: Cache[Any], gqa: Gqa, sinks: Value | None) -> AttentionOptions:
    scales = cache.spec.scales or LayerKvScales()
    return AttentionOptions(
        window=gqa.mask.window,
        is_causal=gqa.mask.is_causal,
        is_window_anchored=gqa.mask.is_window_anchored,
        score_scale=gqa.scale,
        softcap=gqa.softcap,
        sinks=None if sinks is None else _tensor(sinks).float(),
        k_scale=scales.k,
        v_scale=scales.v,
    )


def _tensor(x: Value) -> Tensor:
    assert not isinstance(x, Heads), "heads are read by attention alone"
    return x if isinstance(x, Tensor) else x.value()


def _rotation(q: Heads, k: Heads) -> Rotation:
    assert q.rope is not None and k.rope is not None and (q.norm is None) == (k.norm is None)
    eps = 1e-6 if k.norm is None else k.norm[1]
    return Rotation(
        inv_freq=k.rope.inv_freq,
        amplitude=k.rope.amplitude,
        q_norm=None if q.norm is None else q.norm[0],
        k_norm=None if k.norm is None else k.norm[0],
        eps=eps,
    )
