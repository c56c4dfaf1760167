"""The PyTorch backend of the op façade: runs the network eagerly, on a CPU.

One `TorchOps` lives for one step and holds that step's inputs and attention plan.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache as cached
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch import attention as torch_attention
from dflash_trt.backends.torch import dflash2 as torch_dflash2
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.backends.torch.attention_plan import plan_attention, plan_blocks
from dflash_trt.backends.torch.expert_exchange import RowRouter
from dflash_trt.backends.torch.gated_delta import SlotRows, gated_delta
from dflash_trt.backends.torch.latent_attention import attend_latent
from dflash_trt.backends.torch.linear import apply_linear
from dflash_trt.backends.torch.moe import Choice, chosen_experts, run_chosen_experts
from dflash_trt.backends.torch.paged_rows import previous_rows, read_rows
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.backends.torch.quantized_linear import apply_quantized
from dflash_trt.backends.torch.sampling import AdjustScores
from dflash_trt.backends.torch.scores import Scores
from dflash_trt.backends.torch.shared_rows import SharedRows
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa, QueryTemperature
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.step_plan import TokenMasks
from dflash_trt.formats.base import QuantizedWeight
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
from dflash_trt.network.rope import rope_frequencies
from dflash_trt.network.state import Cache, LatentCache, RecurrentCache, RowCache

R = TypeVar("R")

RopeTable = tuple[Tensor, Tensor]  # cos, sin: [positions or rows, 1, D], in the network's dtype


def make_rope_table(rotary: Rotary, *, num_positions: int, dtype: torch.dtype) -> RopeTable:
    """Tables for positions 0 .. num_positions - 1; angles in float32, as `transformers` computes them."""
    frequencies = rope_frequencies(rotary)
    inv_freq = torch.tensor(frequencies.inv_freq, dtype=torch.float32)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=1)[:, None]  # [positions, 1, D]
    amplitude = frequencies.amplitude
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


@cached
def _constant(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def _chosen(logits: Tensor, experts: Experts[Tensor], moe: Moe) -> Choice:
    return chosen_experts(logits, moe, experts.choice_bias, experts.expert_scales)


class ByGroup:
    """Results of `make` per page group, made when a layer first asks."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._made: dict[int, Any] = {}

    def __getitem__(self, group: int) -> Any:
        if group not in self._made:
            self._made[group] = self._make(group)
        return self._made[group]


class TorchOps:
    """Implements `Ops[Tensor]` for one step."""

    has_fixed_shapes: ClassVar[bool] = False  # in calls over the step's tokens

    def __init__(
        self,
        inputs: StepInputs[Tensor],
        rope_tables: Mapping[Rotary, RopeTable],
        *,
        page_size: int,
        num_draft_tokens: int,
        ranks: RankGroup = ONE_RANK,
        shared_rows: SharedRows | None = None,
        adjust: AdjustScores | None = None,
        masks: TokenMasks | None = None,
        slot_ids: Tensor | None = None,  # int64 [R]; None if request r has slot r
        windows: Sequence[int] = (),  # windows of the page groups after the first
        has_confidence: bool = False,  # of drafts
    ) -> None:
        self._ranks = ranks
        self._shared_rows = shared_rows
        self._adjust = adjust
        self._slot_ids = torch.arange(len(inputs.context_lens)) if slot_ids is None else slot_ids
        self._rope_tables = rope_tables
        self._page_size = page_size
        self._num_draft_tokens = num_draft_tokens
        self._masks = masks
        self._has_confidence = has_confidence
        self._windows: Sequence[int | None] = (None, *windows)
        self._take_rows(inputs)

    def _take_rows(self, inputs: StepInputs[Tensor]) -> None:
        self._inputs = inputs
        self._page_tables = inputs.page_table.view(len(self._windows), -1, inputs.page_table.shape[1])
        self._index = ByGroup(self._index_tokens)

    def for_rows(self, **rows: Tensor) -> Self:
        """The ops of other token rows, given as fields of StepInputs, that are neither sampled nor drafted for."""
        ops = copy(self)
        ops._take_rows(replace(self._inputs, **rows))
        return ops

    def replayed(self, part: str, compute: Callable[[], R]) -> R:
        """`compute()`, which makes results of the step's inputs, pages and slots alone, and reads nothing else."""
        return compute()

    @property
    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def embedding(self, table: Tensor, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        if self._shared_rows is None:
            rows = F.embedding(token_ids, table)
        else:
            rows = self._shared_rows.part_of_embedding(table, token_ids)
        return rows if scale == 1.0 else rows.mul_(_constant(scale, rows.dtype))

    def linear(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        if isinstance(linear.weight, QuantizedWeight):
            return apply_quantized(x, linear)
        return apply_linear(x, linear)

    def unweighted_rms_norm(self, x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32:
            if weight.dtype != x.dtype:
                return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
            return F.rms_norm(x, weight.shape, weight, eps)  # fp32 inside
        # F.rms_norm takes a dozen operators on a CPU.
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        return (x * torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)

    def joint_rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._ranks.num_ranks == 1:
            return self.rms_norm(x, weight, eps)
        wide = x.float()
        mean_square = self.all_reduce(wide.square().mean(-1, keepdim=True)) / self._ranks.num_ranks
        return (wide * torch.rsqrt(mean_square + eps)).to(x.dtype) * weight

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1.0 else x * factor

    def mul(self, x: Tensor, factors: Tensor) -> Tensor:
        return x * factors

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return (x.float() / cap).tanh_().mul_(cap)

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh()

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.float().sigmoid()

    def moe(self, x: Tensor, experts: Experts[Tensor], moe: Moe, routed: Tensor | None = None) -> Tensor:
        logits = self.linear(x if routed is None else routed, experts.router)
        return self._run_experts(x, experts, moe, _chosen(logits, experts, moe))

    def exchanged_moe(
        self, x: Tensor, experts: Experts[Tensor], moe: Moe, exchanged: ExchangedRows, routed: Tensor | None = None
    ) -> Tensor:
        if self._shared_rows is None:
            return self.moe(x, experts, moe, routed)
        router = RowRouter(
            num_experts=moe.num_experts,
            logits=lambda rows: self.linear(rows, experts.router),
            expert_ids=lambda logits: _chosen(logits, experts, moe).expert_ids,
        )

        def run(rows: Tensor, logits: Tensor) -> Tensor:
            return self._run_experts(rows, experts, moe, _chosen(logits, experts, moe))

        return self._shared_rows.run_experts(x, routed, moe, exchanged, router, run)

    def _run_experts(self, x: Tensor, experts: Experts[Tensor], moe: Moe, choice: Choice) -> Tensor:
        return run_chosen_experts(x, experts, moe, choice)

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        return x.split_with_sizes(tuple(sizes), -1)

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(xs), dim=-1)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.flatten(-2)

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, head_dim)

    def gather_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows.flatten())

    def rope_table(self, rotary: Rotary, positions: Tensor) -> RopeTable:
        """Rows of the table, sin with the sign that rotate-half gives the other half of x."""
        cos, sin = (values.index_select(0, positions) for values in self._rope_tables[rotary])
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def rope(self, x: Tensor, table: RopeTable) -> Tensor:
        cos, sin = table
        if x.shape[-1] > cos.shape[-1]:
            rotated, kept = x.tensor_split((cos.shape[-1],), -1)
            return torch.cat((self.rope(rotated, table), kept), -1)
        swapped = torch.roll(x, x.shape[-1] // 2, -1)
        return (x * cos).add_(swapped.mul_(sin))

    def norm_rope(self, x: Tensor, norm: Tensor | None, eps: float, table: Any) -> Tensor:
        """`rope` of the normed heads, `norm` [heads, D]; x may be overwritten."""
        return self.rope(x if norm is None else self.rms_norm(x, norm, eps), table)

    def token_rows(self) -> Rows[Tensor]:
        inputs = self._inputs
        return Rows(
            positions=inputs.positions,
            token_offsets=inputs.token_offsets,
            context_lens=inputs.context_lens,
            page_table=inputs.page_table,
            keeps_kv=True,
            index=self._index,
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rows: Rows[Tensor],
        cache: Cache[Tensor],
        gqa: Gqa,
        sinks: Tensor | None = None,
    ) -> Tensor:
        attend: Any = torch_attention.attend_rows if rows.keeps_kv else torch_attention.attend_blocks
        is_tiled = self.has_fixed_shapes and rows.keeps_kv
        scores = Scores(scale=gqa.scale, softcap=gqa.softcap, sinks=sinks, is_tiled=is_tiled)
        attended: Tensor = attend(rows.index[cache.group], q, k, v, cache, gqa.mask, scores)
        return attended

    def tempered(self, q: Tensor, rows: Rows[Tensor], temperature: QueryTemperature) -> Tensor:
        intervals = ((rows.positions + 1) // temperature.interval).float()
        return (q * (1 + temperature.scale * intervals.log1p())[:, None, None]).to(q.dtype)

    def pairs_to_halves(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., 0::2], x[..., 1::2]), -1)

    def attend_latent(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        rows: Rows[Tensor],
        cache: LatentCache[Tensor],
        mla: Mla,
    ) -> Tensor:
        assert rows.keeps_kv, "a draft block has no latents"
        index, is_tiled = rows.index[0], self.has_fixed_shapes
        return attend_latent(index, q_nope, q_rope, latents, k_rope, kv_b, cache, mla, self._ranks, is_tiled=is_tiled)

    def gated_delta(
        self,
        qkvz: Tensor,
        ba: Tensor,
        parameters: DeltaParameters[Tensor],
        rows: Rows[Tensor],
        cache: RecurrentCache[Tensor],
        spec: GatedDelta,
        eps: float,
    ) -> Tensor:
        assert rows.keeps_kv, "a draft block has no recurrent layers"
        return gated_delta(qkvz, ba, parameters, self._slot_rows, cache, spec, eps)

    def store_states(self) -> None:
        """Write recurrent states to their slots, when the step has succeeded."""
        if "_slot_rows" in vars(self):
            self._slot_rows.store()

    @cached_property
    def _slot_rows(self) -> SlotRows:
        inputs = self._inputs
        return SlotRows(
            slot_ids=self._slot_ids,
            num_rows=inputs.token_offsets.diff().tolist(),
            context_lens=inputs.context_lens.long(),
        )

    def store_kv(self, kv: Tensor, layers: Sequence[KvDestination[Tensor]], rows: Rows[Tensor], limits: Tensor) -> None:
        for layer, (k, v) in zip(layers, rotated_kv(self, kv, layers), strict=True):
            kept, slots = rows.index[layer.cache.group].kept_rows(rows.positions, limits)
            torch_attention.write_pages(layer.cache, slots, k.index_select(0, kept), v.index_select(0, kept))

    def sample_and_accept(self, logits: Tensor) -> Acceptance[Tensor]:
        return torch_sampling.sample_and_accept(logits, self._inputs, self._adjust, self._masks)

    def token_blocks(
        self, acceptance: Acceptance[Tensor], *, fill: int, drafts_from_anchor: bool = False
    ) -> TokenBlocks[Tensor]:
        width = self._num_draft_tokens + (not drafts_from_anchor)
        token_ids = torch.full((len(acceptance.bonus_tokens), width), fill, dtype=torch.int32)
        token_ids[:, 0] = acceptance.bonus_tokens
        return self._blocks(token_ids, acceptance)

    def chain_blocks(self, acceptance: Acceptance[Tensor], drafts: Sequence[Tensor]) -> TokenBlocks[Tensor]:
        return self._blocks(torch.cat((acceptance.bonus_tokens[:, None], *drafts), dim=1), acceptance)

    def _blocks(self, token_ids: Tensor, acceptance: Acceptance[Tensor]) -> TokenBlocks[Tensor]:
        starts, width = acceptance.next_context_lens, token_ids.shape[1]
        positions = (starts[:, None] + torch.arange(width, dtype=torch.int32)).flatten()
        rows = Rows(
            positions=positions,
            token_offsets=None,
            context_lens=starts,
            page_table=self._inputs.page_table,
            keeps_kv=False,
            index=ByGroup(partial(self._index_blocks, positions, starts)),
        )
        return TokenBlocks(token_ids=token_ids.flatten(), rows=rows)

    def previous_rows(self, x: Tensor, rows: Rows[Tensor], cache: RowCache[Tensor]) -> Tensor:
        assert rows.keeps_kv, "only the step's own tokens have rows in pages"
        return previous_rows(x, self._inputs, self._page_tables[0], cache)

    def context_rows(self, cache: RowCache[Tensor], acceptance: Acceptance[Tensor]) -> Tensor:
        return read_rows(cache, self._page_tables[0], acceptance.next_context_lens.long() - 1)

    def stack_slots(self, slots: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(slots), dim=1).flatten(0, 1)

    def last_slot(self, x: Tensor, num_slots: int) -> Tensor:
        return x.view(-1, num_slots, x.shape[-1])[:, -1].contiguous()

    def slot_rows(self, x: Tensor, slot: int) -> Tensor:
        return x.reshape(len(self._inputs.context_lens), -1, x.shape[-1])[:, slot]

    def without_first(self, hidden: Tensor) -> Tensor:
        blocks = hidden.view(-1, self._num_draft_tokens + 1, hidden.shape[-1])
        return blocks[:, 1:].reshape(-1, hidden.shape[-1])

    def draft_tokens(
        self,
        logits: Tensor,
        acceptance: Acceptance[Tensor],
        draft_to_target: Tensor | None,
        *,
        draft_topk: int,
        first_slot: int = 1,
    ) -> Proposal[Tensor]:
        proposal = torch_sampling.draft_tokens(
            logits, self._inputs, acceptance, draft_to_target, draft_topk=draft_topk, first_slot=first_slot
        )
        return self._with_confidence(proposal, logits)

    def _with_confidence(self, proposal: Proposal[Tensor], scores: Tensor) -> Proposal[Tensor]:
        """The probability of the most likely token, by `scores` [..., any] without noise."""
        if not self._has_confidence:
            return proposal
        scores = scores.float()
        confidence = (scores.amax(-1) - scores.logsumexp(-1)).exp()
        return replace(proposal, confidence=confidence.view(proposal.tokens.shape))

    def block_conv(self, x: Tensor, filters: Tensor, base: Tensor) -> Tensor:
        return torch_dflash2.block_conv(x, filters, base, num_slots=self._num_draft_tokens + 1)

    def select_tokens(
        self, logits: Tensor, hidden: Tensor, codebooks: Codebooks[Tensor], acceptance: Acceptance[Tensor]
    ) -> Proposal[Tensor]:
        proposal, scores = torch_dflash2.select_tokens(logits, hidden, codebooks, self._inputs, acceptance)
        return self._with_confidence(proposal, scores)

    def _index_tokens(self, group: int) -> Any:
        return plan_attention(
            self._inputs,
            page_table=self._page_tables[group],
            page_size=self._page_size,
            num_draft_tokens=self._num_draft_tokens,
            has_fixed_shapes=self.has_fixed_shapes,
            window=self._windows[group],
        )

    def _index_blocks(
        self,
        positions: Tensor,  # int32 [R*S]
        starts: Tensor,  # int32 [R]
        group: int,
    ) -> Any:
        return plan_blocks(
            self._page_tables[group],
            starts,
            page_size=self._page_size,
            num_slots=len(positions) // len(starts),
            scratch=self._index[group].scratch,
            window=self._windows[group],
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._ranks.all_reduce(x)

    def all_gather_vocab(self, logits: Tensor, exchanged: ExchangedRows) -> Tensor:
        if self._shared_rows is None:
            return self._ranks.all_gather_columns(logits)
        return self._shared_rows.own_rows(logits, exchanged)

    def all_gather_rows(self, x: Tensor, exchanged: ExchangedRows) -> Tensor:
        return x if self._shared_rows is None else self._shared_rows.all_gather(x, exchanged)

    def reduce_scatter_rows(self, x: Tensor, exchanged: ExchangedRows) -> Tensor:
        return x if self._shared_rows is None else self._shared_rows.reduce_scatter(x, exchanged)
