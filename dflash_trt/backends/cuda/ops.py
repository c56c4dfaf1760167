"""The ops over the GPU kernels: a step is a fixed sequence of launches that never waits for the host.

Handles are tensors, or lazy ops, fused into the next kernel (`handles.py`). One `TorchGpuOps` lives for one step;
everything that outlives it is in `GpuResources`. Runs on a CPU under Triton's interpreter, in float32, for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as cached
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.cuda.experts import DeviceExperts, chosen_of_all, run_device_experts
from dflash_trt.backends.cuda.gated_delta import StepSlots, apply_gated_delta
from dflash_trt.backends.cuda.handles import (
    Attended,
    Gated,
    Heads,
    Norm,
    RopeRows,
    RowsIndex,
    Sum,
    Value,
    rotation_of,
    rows_of,
    tensor_of,
)
from dflash_trt.backends.cuda.latent_attention import attend_device_latent, attend_latent_in_splits, own_pieces
from dflash_trt.backends.cuda.linear import Plain, apply_device_linear
from dflash_trt.backends.cuda.logit_rules import StepRules
from dflash_trt.backends.cuda.resources import GpuResources
from dflash_trt.backends.torch.expert_exchange import RowRouter
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup, summed_in_order
from dflash_trt.backends.torch.shared_rows import SharedRows
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa, QueryTemperature
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.kernels import attention_launch, sampling_launch, selector_launch
from dflash_trt.kernels.attention_plan import AttentionOptions
from dflash_trt.kernels.norm_launch import sigmoid_mul
from dflash_trt.kernels.paged_rows_launch import last_rows, previous_rows
from dflash_trt.kernels.rope_and_pages_launch import (
    Rotation,
    rotate_and_store,
    rotate_block,
    rotate_queries,
    store_draft_context,
)
from dflash_trt.kernels.row_codes_launch import RowCodes
from dflash_trt.kernels.sampling_launch import SamplingInputs, SamplingOutputs
from dflash_trt.network.mixers.gqa import rotated_kv
from dflash_trt.network.ops import (
    Acceptance,
    Codebooks,
    DeltaParameters,
    ExchangedRows,
    Experts,
    KvDestination,
    Linear,
    Rows,
    StepInputs,
    TokenBlocks,
)
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.state import Cache, LatentCache, RecurrentCache, RowCache


class TorchGpuOps:
    """Implements `Ops[Value]` for one step; `run_step` may treat the handles as tensors.

    In a deterministic step, whose resources have `splits`, a row's bits depend on its request alone: attention has
    splits of a fixed length, gated delta nets go token by token, and sums over ranks have one order. Linears and
    experts were prepared with fixed tiles at load; all else works row by row anyway. The target alone computes so:
    drafts decide how fast a text comes, and never which.
    """

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        resources: GpuResources,
        *,
        num_draft_tokens: int,
        outputs: SamplingOutputs | None = None,
        ranks: RankGroup = ONE_RANK,
        shared_rows: SharedRows | None = None,
        rules: StepRules | None = None,
        slots: StepSlots | None = None,
    ) -> None:
        """`outputs` is a fixed destination of sampling, if the caller needs one.

        Recurrent layers need `slots`.
        """
        self._inputs, self._num_draft_tokens = inputs, num_draft_tokens
        self._rules = rules
        self._slots = slots
        self._resources, self._splits = resources, resources.splits
        self._outputs = outputs
        self._ranks, self._shared_rows = ranks, shared_rows
        self._query_factors: dict[QueryTemperature, Tensor] = {}  # float32 [T, 1, 1]

    def embedding(self, table: Value, token_ids: Value, scale: float = 1.0) -> Tensor:
        ids, weight = tensor_of(token_ids), tensor_of(table)
        if self._shared_rows is None:
            rows = F.embedding(ids, weight)
        else:
            rows = self._shared_rows.part_of_embedding(weight, ids)
        return rows if scale == 1.0 else rows * _rounded(scale, rows.dtype)

    def linear(self, x: Value, linear: Linear[Any]) -> Tensor:
        activation = x if isinstance(x, Norm | Gated | Attended) else Plain(tensor_of(x))
        return apply_device_linear(activation, linear)

    def rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        if isinstance(x, Heads):
            assert x.norm is None and x.rope is None
            return Heads(x.x, norm=(tensor_of(weight), eps))
        return Norm(x if isinstance(x, Sum) else tensor_of(x), tensor_of(weight), eps)

    def unweighted_rms_norm(self, x: Value, eps: float) -> Value:
        if isinstance(x, Heads):
            assert x.norm is None and x.rope is None
            return Heads(x.x, norm=(None, eps))
        rows = tensor_of(x)
        return F.rms_norm(rows, rows.shape[-1:], None, eps)

    def joint_rms_norm(self, x: Value, weight: Value, eps: float) -> Value:
        if self._ranks.num_ranks == 1:
            return self.rms_norm(x, weight, eps)
        wide = tensor_of(x).float()
        mean_square = self._ranks.all_reduce(wide.square().mean(-1, keepdim=True)) / self._ranks.num_ranks
        return (wide * torch.rsqrt(mean_square + eps)).to(tensor_of(x).dtype) * tensor_of(weight)

    def add(self, a: Value, b: Value) -> Sum:
        return Sum(tensor_of(a), tensor_of(b))

    def scale(self, x: Value, factor: float) -> Tensor:
        return tensor_of(x) if factor == 1.0 else tensor_of(x) * factor

    def mul(self, x: Value, factors: Value) -> Tensor:
        return tensor_of(x) * tensor_of(factors)

    def silu_mul(self, gate_up: Value) -> Gated:
        return Gated(tensor_of(gate_up))

    def sigmoid_mul(self, x: Value, gate: Value) -> Tensor:
        return sigmoid_mul(tensor_of(x).contiguous(), tensor_of(gate).contiguous())

    def gelu_mul(self, gate_up: Value) -> Gated:
        return Gated(tensor_of(gate_up), is_gelu=True)

    def softcap(self, x: Value, cap: float) -> Tensor:
        return (tensor_of(x).float() / cap).tanh_().mul_(cap)

    def tanh(self, x: Value) -> Tensor:
        return tensor_of(x).tanh()

    def sigmoid(self, x: Value) -> Tensor:
        return tensor_of(x).float().sigmoid()

    def moe(self, x: Value, experts: Experts[Any], moe: Moe, routed: Value | None = None) -> Tensor:
        assert isinstance(experts, DeviceExperts)
        logits = self.linear(x if routed is None else routed, experts.router)
        return run_device_experts(tensor_of(x), logits, experts, moe)

    def exchanged_moe(
        self, x: Value, experts: Experts[Any], moe: Moe, exchanged: ExchangedRows, routed: Value | None = None
    ) -> Tensor:
        if self._shared_rows is None:
            return self.moe(x, experts, moe, routed)
        assert isinstance(experts, DeviceExperts)
        router = RowRouter(
            num_experts=moe.num_experts,
            logits=lambda rows: self.linear(rows, experts.router),
            expert_ids=lambda logits: chosen_of_all(logits, experts, moe),
        )

        def run(rows: Tensor, logits: Tensor) -> Tensor:
            return run_device_experts(rows, logits, experts, moe)

        routed_rows = None if routed is None else tensor_of(routed)
        return self._shared_rows.run_experts(tensor_of(x), routed_rows, moe, exchanged, router, run)

    def split(self, x: Value, sizes: Sequence[int]) -> Sequence[Value]:
        if isinstance(x, Heads):
            assert x.norm is None and x.rope is None
            return [Heads(part) for part in torch.split(x.x, list(sizes), dim=-1)]
        return torch.split(tensor_of(x), list(sizes), dim=-1)

    def concat(self, xs: Sequence[Value]) -> Tensor:
        return torch.cat([tensor_of(x) for x in xs], dim=-1)

    def split_heads(self, x: Value, head_dim: int) -> Heads:
        x = tensor_of(x)
        return Heads(x.view(len(x), -1, head_dim))

    def merge_heads(self, x: Value) -> Tensor:
        assert isinstance(x, Heads) and x.rope is None
        if x.norm is None:
            return x.x.flatten(1).contiguous()  # a view if there is a single head, next to its gate
        weight, eps = x.norm
        return F.rms_norm(x.x, x.x.shape[-1:], weight, eps).flatten(1)

    def gather_rows(self, x: Value, rows: Value) -> Tensor:
        return tensor_of(x).index_select(0, tensor_of(rows).flatten())

    def rope_table(self, rotary: Rotary, positions: Value) -> RopeRows:
        inv_freq, amplitude = self._resources.rope[rotary]
        return RopeRows(inv_freq, amplitude, tensor_of(positions))

    def rope(self, x: Value, table: RopeRows) -> Heads:
        assert isinstance(x, Heads) and x.rope is None
        return replace(x, rope=table)

    def tempered(self, q: Value, rows: Rows[Any], temperature: QueryTemperature) -> Heads:
        """Before the rotation, which keeps lengths. Layers of a step share the factors."""
        assert isinstance(q, Heads) and q.norm is None and rows.keeps_kv, "others are refused"
        if temperature not in self._query_factors:
            intervals = ((rows.positions + 1) // temperature.interval).float()
            self._query_factors[temperature] = (1 + temperature.scale * intervals.log1p())[:, None, None]
        scaled = torch.empty(q.x.shape, dtype=q.x.dtype, device=q.x.device)
        return replace(q, x=torch.mul(q.x, self._query_factors[temperature], out=scaled))

    def token_rows(self) -> Rows[Any]:
        inputs, latents = self._inputs, self._resources.latents
        rows = rows_of(inputs.positions, inputs.token_offsets, inputs.context_lens, inputs.page_table, keeps_kv=True)
        if self._splits is not None:
            groups = ((group, self._splits.pieces(group.requests, len(rows.positions))) for group in rows.index)
            return replace(rows, index=tuple(replace(group, pieces=tuple(pieces)) for group, pieces in groups))
        if latents is None or latents.part.num_ranks == 1:
            return rows
        first, *others = rows.index
        num_verify_rows = self._num_draft_tokens + 1
        pieces = own_pieces(first.requests, rows.positions, latents.part, num_verify_rows=num_verify_rows)
        return replace(rows, index=(replace(first, own_pieces=tuple(pieces)), *others))

    def attend(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        rows: Rows[Any],
        cache: Cache[Any],
        gqa: Gqa,
        sinks: Value | None = None,
    ) -> Attended:
        """K and V are stored now; the linear that reads the result says whether it wants codes."""
        assert isinstance(q, Heads)
        options, index = _options(cache, gqa, sinks), rows.index[cache.group]
        if k is None or v is None:  # an earlier layer has stored them
            assert rows.keeps_kv and k is v
            queries = rotate_queries(q.x, rows.positions, rotation_of(q))
            run = self._attend_rows(queries, index, cache.tensor, options)
        else:
            assert isinstance(k, Heads) and isinstance(v, Heads)
            attended = self._store_and_attend if rows.keeps_kv else self._attend_blocks
            run = attended(q, k, v, rows.positions, index, cache.tensor, options)
        num_rows, features = len(q.x), q.x[0].numel()
        codes = self._resources.attended_codes[: num_rows * features].view(num_rows, features)
        return Attended(run, codes)

    def _store_and_attend(
        self, q: Heads, k: Heads, v: Heads, positions: Tensor, index: RowsIndex, pool: Tensor, options: AttentionOptions
    ) -> Callable[[RowCodes | None], Tensor]:
        rotated = rotate_and_store(
            q.x,
            k.x,
            v.x,
            pool,
            index.requests,
            positions,
            rotation_of(q, k, v),
            k_scale=options.k_scale,
            v_scale=options.v_scale,
        )
        assert rotated is not None
        return self._attend_rows(rotated, index, pool, options)

    def _attend_rows(
        self, queries: Tensor, index: RowsIndex, pool: Tensor, options: AttentionOptions
    ) -> Callable[[RowCodes | None], Tensor]:
        attended = self._resources.attended[: queries.numel()].view(queries.shape)
        if self._splits is not None:
            options = replace(options, split_length=self._splits.split_length)

        def run(codes: RowCodes | None) -> Tensor:
            for piece in index.pieces:
                attention_launch.attend_pages(
                    queries[piece.rows],
                    pool,
                    piece.requests,
                    options,
                    workspace=self._resources.attention_workspace,
                    plans=piece.plans,
                    num_verify_rows=self._num_draft_tokens + 1,
                    attended=attended[piece.rows],
                    codes=None if codes is None else replace(codes, values=codes.values[piece.rows]),
                )
            return attended.flatten(1)

        return run

    def _attend_blocks(
        self, q: Heads, k: Heads, v: Heads, positions: Tensor, index: RowsIndex, pool: Tensor, options: AttentionOptions
    ) -> Callable[[RowCodes | None], Tensor]:
        assert v.norm is None, "no drafter norms its values"
        q_rows, k_rows = rotate_block(q.x, k.x, positions, rotation_of(q, k))
        (piece,) = index.pieces

        def run(codes: RowCodes | None) -> Tensor:
            attended = attention_launch.attend_draft(
                q_rows,
                (k_rows, v.x),
                pool,
                piece.requests,
                options,
                workspace=self._resources.attention_workspace,
                plans=piece.plans,
                codes=codes,
            )
            return attended.flatten(1)

        return run

    def pairs_to_halves(self, x: Value) -> Heads:
        assert isinstance(x, Heads) and x.norm is None and x.rope is None
        return replace(x, is_paired=True)

    def attend_latent(
        self,
        q_nope: Value,
        q_rope: Value,
        latents: Value,
        k_rope: Value,
        kv_b: Value,
        rows: Rows[Any],
        cache: LatentCache[Any],
        mla: Mla,
    ) -> Tensor:
        assert isinstance(q_nope, Heads) and isinstance(q_rope, Heads) and isinstance(k_rope, Heads)
        assert isinstance(latents, Norm) and rows.keeps_kv, "a draft block has no latents"
        memory, workspace = self._resources.latents, self._resources.attention_workspace
        given = (q_nope, q_rope), (latents, k_rope), tensor_of(kv_b), rows, cache, mla, memory, workspace
        if self._splits is not None:
            return attend_latent_in_splits(*given, split_length=self._splits.split_length)
        return attend_device_latent(*given, self._ranks, num_verify_rows=self._num_draft_tokens + 1)

    def gated_delta(
        self,
        qkvz: Value,
        ba: Value,
        parameters: DeltaParameters[Any],
        rows: Rows[Any],
        cache: RecurrentCache[Any],
        spec: GatedDelta,
        eps: float,
    ) -> Tensor:
        assert self._slots is not None
        given = tensor_of(qkvz), tensor_of(ba), parameters, rows, self._slots, cache, eps
        return apply_gated_delta(*given, is_in_order=self._splits is not None)

    def store_kv(self, kv: Value, layers: Sequence[KvDestination[Any]], rows: Rows[Any], limits: Value) -> None:
        """All layers in one launch, from what `GpuResources.draft_layers` has stacked of them, else one launch each."""
        stacked, (first, *others) = self._resources.draft_layers, layers
        if stacked is None:
            for layer, pair in zip(layers, rotated_kv(self, kv, layers), strict=True):
                self._store_layer(layer, pair, rows, tensor_of(limits))
            return
        assert stacked.first_pages is first.cache.tensor
        assert len(others) + 1 == len(stacked.page_offsets) and all(other.rope is first.rope for other in others)
        assert all(other.cache.group == first.cache.group for other in others), "a drafter's layers keep the same pages"
        store_draft_context(
            tensor_of(kv),
            stacked,
            replace(rows.index[first.cache.group].requests, context_lens=tensor_of(limits)),
            rows.positions,
            Rotation(inv_freq=first.rope.inv_freq, amplitude=first.rope.amplitude, eps=first.eps),
        )

    def _store_layer(
        self, layer: KvDestination[Any], pair: tuple[Value, Value], rows: Rows[Any], limits: Tensor
    ) -> None:
        """K of part of a head rotated, or normed by a float32 weight."""
        (k, v), rope, scales = pair, layer.rope, layer.cache.spec.scales or LayerKvScales()
        assert isinstance(k, Heads) and isinstance(v, Heads)
        rotate_and_store(
            None,
            k.x,
            v.x,
            layer.cache.tensor,
            rows.index[layer.cache.group].requests,
            rows.positions,
            Rotation(inv_freq=rope.inv_freq, amplitude=rope.amplitude, k_norm=layer.k_norm, eps=layer.eps),
            k_scale=scales.k,
            v_scale=scales.v,
            limits=limits,
        )

    def sample_and_accept(self, logits: Value) -> Acceptance[Any]:
        inputs, raw = self._inputs, tensor_of(logits)
        num_requests, width = inputs.logit_rows.shape
        scores = raw if self._rules is None else self._rules.scores(raw)
        outputs = self._outputs or sampling_launch.allocate_outputs(num_requests, width, scores.device)
        sampling_launch.sample_and_accept(
            scores,
            SamplingInputs(**{name: getattr(inputs, name) for name in SamplingInputs.__dataclass_fields__}),
            outputs,
            self._resources.sampling_workspace,
        )
        if self._rules is not None:
            self._rules.write_logprobs(raw, scores, outputs)
        return Acceptance(**{name: getattr(outputs, name) for name in SamplingOutputs.__dataclass_fields__})

    def token_blocks(
        self, acceptance: Acceptance[Any], *, fill: int, drafts_from_anchor: bool = False
    ) -> TokenBlocks[Any]:
        return self._blocks(acceptance, fill=fill, width=self._num_draft_tokens + (not drafts_from_anchor))

    def chain_blocks(self, acceptance: Acceptance[Any], drafts: Sequence[Value]) -> TokenBlocks[Any]:
        blocks = self._blocks(acceptance, fill=0, width=len(drafts) + 1)
        if drafts:
            token_ids = torch.cat([acceptance.bonus_tokens[:, None], *(tensor_of(draft) for draft in drafts)], dim=1)
            blocks = TokenBlocks(token_ids=token_ids.flatten(), rows=blocks.rows)
        return blocks

    def _blocks(self, acceptance: Acceptance[Any], *, fill: int, width: int) -> TokenBlocks[Any]:
        inputs, starts = self._inputs, acceptance.next_context_lens
        shape = (len(acceptance.bonus_tokens), width)
        token_ids, positions = (torch.empty(shape, dtype=torch.int32, device=starts.device) for _ in range(2))
        sampling_launch.draft_block(acceptance.bonus_tokens, starts, token_ids, positions, mask_token_id=fill)
        rows = rows_of(positions.flatten(), inputs.token_offsets, starts, inputs.page_table, keeps_kv=False)
        return TokenBlocks(token_ids=token_ids.flatten(), rows=rows)

    def previous_rows(self, x: Value, rows: Rows[Any], cache: RowCache[Any]) -> Tensor:
        assert rows.keeps_kv, "only the step's own tokens have rows in pages"
        return previous_rows(tensor_of(x), cache.tensor, rows.index[0].requests, rows.positions)

    def context_rows(self, cache: RowCache[Any], acceptance: Acceptance[Any]) -> Tensor:
        starts = acceptance.next_context_lens
        table = self._inputs.page_table
        first = table.view(-1, len(starts), table.shape[-1])[0]  # features are never windowed
        return last_rows(cache.tensor, first, starts)

    def stack_slots(self, slots: Sequence[Value]) -> Tensor:
        return torch.stack([tensor_of(slot) for slot in slots], dim=1).flatten(0, 1)

    def last_slot(self, x: Value, num_slots: int) -> Tensor:
        rows = tensor_of(x)
        return rows.view(-1, num_slots, rows.shape[-1])[:, -1].contiguous()

    def slot_rows(self, x: Value, slot: int) -> Tensor:
        rows = tensor_of(x)
        return rows.reshape(len(self._inputs.context_lens), -1, rows.shape[-1])[:, slot]

    def without_first(self, hidden: Value) -> Tensor:
        x = tensor_of(hidden)
        blocks = x.view(-1, self._num_draft_tokens + 1, x.shape[-1])
        return blocks[:, 1:].reshape(-1, x.shape[-1])

    def draft_tokens(
        self,
        logits: Value,
        acceptance: Acceptance[Any],
        draft_to_target: Value | None,
        *,
        draft_topk: int,
        first_slot: int = 1,
    ) -> Proposal[Any]:
        inputs, mapped = self._inputs, None if draft_to_target is None else tensor_of(draft_to_target)
        starts = acceptance.next_context_lens if first_slot == 1 else acceptance.next_context_lens + (first_slot - 1)
        tokens, draft_topk_ids, draft_topk_probs = sampling_launch.draft_tokens(
            tensor_of(logits),
            inputs.temperature,
            inputs.seed,
            inputs.draft_stream,
            starts,
            mapped,
            draft_topk=draft_topk,
        )
        return Proposal(tokens=tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)

    def block_conv(self, x: Value, filters: Value, base: Value) -> Tensor:
        num_slots = self._num_draft_tokens + 1
        return selector_launch.block_conv(tensor_of(x), tensor_of(filters), tensor_of(base), num_slots=num_slots)

    def select_tokens(
        self, logits: Value, hidden: Value, codebooks: Codebooks[Any], acceptance: Acceptance[Any]
    ) -> Proposal[Any]:
        inputs, starts = self._inputs, acceptance.next_context_lens
        tokens, draft_topk_ids, draft_topk_probs = selector_launch.select_tokens(
            tensor_of(logits),
            tensor_of(hidden),
            (tensor_of(codebooks.predecessor), tensor_of(codebooks.successor)),
            (acceptance.bonus_tokens, inputs.temperature, inputs.seed, inputs.draft_stream, starts),
            top_k=codebooks.top_k,
        )
        return Proposal(tokens=tokens, draft_topk_ids=draft_topk_ids, draft_topk_probs=draft_topk_probs)

    def all_reduce(self, x: Value) -> Tensor:
        if self._splits is None or self._ranks.num_ranks == 1:
            return self._ranks.all_reduce(tensor_of(x))
        return summed_in_order(self._ranks, tensor_of(x))

    def all_gather_vocab(self, logits: Value, exchanged: ExchangedRows) -> Tensor:
        if self._shared_rows is None:
            return self._ranks.all_gather_columns(tensor_of(logits))
        return self._shared_rows.own_rows(tensor_of(logits), exchanged)

    def all_gather_rows(self, x: Value, exchanged: ExchangedRows) -> Value:
        return x if self._shared_rows is None else self._shared_rows.all_gather(tensor_of(x), exchanged)

    def reduce_scatter_rows(self, x: Value, exchanged: ExchangedRows) -> Value:
        return x if self._shared_rows is None else self._shared_rows.reduce_scatter(tensor_of(x), exchanged)


@cached
def _rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number of `dtype`, without a tensor on the device that a graph would have to keep."""
    return torch.tensor(value, dtype=dtype).item()


def _options(cache: Cache[Any], gqa: Gqa, sinks: Value | None) -> AttentionOptions:
    scales = cache.spec.scales or LayerKvScales()
    return AttentionOptions(
        window=gqa.mask.window,
        chunk=gqa.mask.chunk,
        is_causal=gqa.mask.is_causal,
        is_window_anchored=gqa.mask.is_window_anchored,
        first_key=gqa.mask.first_key,
        score_scale=gqa.scale,
        softcap=gqa.softcap,
        sinks=None if sinks is None else tensor_of(sinks).float(),
        k_scale=scales.k,
        v_scale=scales.v,
    )
