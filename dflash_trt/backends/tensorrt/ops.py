"""The TensorRT backend of the op façade: emits `INetworkDefinition` layers, strongly typed.

One `TrtOps` lives for one network definition. Weights are HostTensors and become constants when an op first uses
them. Attention, recurrence, experts and sampling are plugin nodes (`plugins`), which write pages where they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from dflash_trt.backends.tensorrt.collectives import Collectives, SharedRows
from dflash_trt.backends.tensorrt.drafter_ops import DrafterOps, num_drafts
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.latent_ops import LatentOps
from dflash_trt.backends.tensorrt.layers import Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.plugins import PluginLowering
from dflash_trt.backends.tensorrt.quantized_linear import quantized_linear
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa, QueryTemperature
from dflash_trt.core.model.rope import Rotary
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.network.mixers.gqa import rotated_kv
from dflash_trt.network.ops import (
    Acceptance,
    DeltaParameters,
    ExchangedRows,
    Experts,
    KvDestination,
    Linear,
    Rows,
    StackedExperts,
    StepInputs,
    TokenBlocks,
)
from dflash_trt.network.state import Cache, RecurrentCache

RopeTables = Mapping[Rotary, tuple[HostTensor, HostTensor]]  # cos, sin [positions, 1, D]


_GELU_CUBE: Final = 0.044715
_GELU_SCALE: Final = (2 / math.pi) ** 0.5


@dataclass(frozen=True, slots=True)
class _Store:
    """K and V to be written to a state, as far as `limits`: by the attention that reads it, or alone."""

    kv: tuple[ITensor, ITensor]
    limits: ITensor
    cache: Cache[ITensor]


class TrtOps(DrafterOps, LatentOps):
    """Implements `Ops[Handle]` for one network. K comes from `logit_rows`, so it serves every K >= 1."""

    def __init__(
        self,
        layers: Layers,
        lowering: PluginLowering,
        inputs: StepInputs[ITensor],
        rope_tables: RopeTables,
        collectives: Collectives | None = None,  # None where attention is whole on each rank
        shared_rows: SharedRows | None = None,  # of ranks with requests of their own
        *,
        max_draft_len: int = 0,
    ) -> None:
        super().__init__(layers, inputs, lowering, max_draft_len=max_draft_len)
        self._rope_tables = rope_tables
        self._collectives = collectives
        self._shared_rows = shared_rows
        self._stores: dict[str, _Store] = {}  # that no attention has done along the way yet, by name of the state

    def embedding(self, table: Handle, token_ids: ITensor, scale: float = 1.0) -> ITensor:
        layers, shared = self._layers, self._shared_rows
        if shared is None:
            rows = layers.gather(layers.tensor(table), token_ids)
        else:
            rows = shared.part_of_embedding(table, token_ids)
        return rows if scale == 1.0 else layers.binary("PROD", rows, scale)

    def linear(self, x: ITensor, linear: Linear[Handle]) -> ITensor:
        layers = self._layers
        if isinstance(linear.weight, Int8Weight):
            return self._lowering.int8_linear(x, linear.weight, linear.bias)
        if isinstance(linear.weight, QuantizedWeight):
            out = quantized_linear(layers, x, linear.weight)
        else:
            out = layers.matmul(x, layers.tensor(linear.weight), is_b_transposed=True)
        if linear.bias is None:
            return out
        return layers.binary("SUM", out, layers.reshape(layers.tensor(linear.bias), (1, -1)))

    def rms_norm(self, x: ITensor, weight: Handle, eps: float) -> ITensor:
        return self._normed(x, self._mean_square(x), weight, eps)

    def unweighted_rms_norm(self, x: ITensor, eps: float) -> ITensor:
        return self._normed(x, self._mean_square(x), None, eps)

    def joint_rms_norm(self, x: ITensor, weight: Handle, eps: float) -> ITensor:
        mean_square = self._mean_square(x)
        if self._collectives is not None:  # over features that the ranks share evenly
            total = self._collectives.all_reduce(mean_square)
            mean_square = self._layers.binary("DIV", total, float(self._collectives.num_ranks))
        return self._normed(x, mean_square, weight, eps)

    def _mean_square(self, x: ITensor) -> ITensor:
        """Over the last axis, which stays with one element; float32."""
        wide = self._layers.cast(x, "float32")
        return self._layers.reduce("AVG", self._layers.binary("PROD", wide, wide), len(x.shape) - 1)

    def _normed(self, x: ITensor, mean_square: ITensor, weight: Handle | None, eps: float) -> ITensor:
        layers, last = self._layers, len(x.shape) - 1
        wide = layers.cast(x, "float32")  # fp32 inside
        normed = layers.binary("DIV", wide, layers.unary("SQRT", layers.binary("SUM", mean_square, eps)))
        if weight is None:
            return layers.cast_like(normed, x)
        gain = layers.reshape(layers.cast(layers.tensor(weight), "float32"), (1,) * last + (-1,))
        return layers.cast_like(layers.binary("PROD", normed, gain), x)  # back to x's dtype

    def add(self, a: ITensor, b: ITensor) -> ITensor:
        return self._layers.binary("SUM", a, b)

    def scale(self, x: ITensor, factor: float) -> ITensor:
        if factor == 1.0:
            return x
        layers = self._layers
        return layers.cast_like(layers.binary("PROD", layers.cast(x, "float32"), factor), x)  # one rounding

    def mul(self, x: ITensor, factors: Handle) -> ITensor:
        factors = self._layers.tensor(factors)
        by_rows = factors if len(factors.shape) == len(x.shape) else self._layers.reshape(factors, (1, -1))
        return self._layers.binary("PROD", x, by_rows)

    def silu_mul(self, gate_up: ITensor) -> ITensor:
        layers = self._layers
        half = gate_up.shape[-1] // 2
        gate, up = self.split(gate_up, (half, half))
        wide = layers.cast(gate, "float32")  # fp32 inside the activation
        return layers.binary("PROD", layers.cast_like(layers.binary("PROD", wide, layers.sigmoid(wide)), gate), up)

    def gelu_mul(self, gate_up: ITensor) -> ITensor:
        layers = self._layers
        half = gate_up.shape[-1] // 2
        gate, up = self.split(gate_up, (half, half))
        activated = _gelu_tanh(layers, layers.cast(gate, "float32"))
        return layers.binary("PROD", layers.cast_like(activated, gate), up)

    def softcap(self, x: ITensor, cap: float) -> ITensor:
        layers = self._layers
        wide = layers.cast(x, "float32")
        return layers.binary("PROD", layers.tanh(layers.binary("DIV", wide, cap)), cap)

    def tanh(self, x: ITensor) -> ITensor:
        return self._layers.tanh(x)

    def sigmoid(self, x: ITensor) -> ITensor:
        return self._layers.sigmoid(self._layers.cast(x, "float32"))

    def sigmoid_mul(self, x: ITensor, gate: ITensor) -> ITensor:
        return self._layers.binary("PROD", x, self._layers.sigmoid(gate))

    def merge_heads(self, x: ITensor) -> ITensor:
        return self._layers.reshape(x, (-1, x.shape[-2] * x.shape[-1]))

    def split(self, x: ITensor, sizes: Sequence[int]) -> Sequence[ITensor]:
        last = len(x.shape) - 1
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self._layers.slice(x, last, start, size) for start, size in zip(starts, sizes, strict=True)]

    def concat(self, xs: Sequence[ITensor]) -> ITensor:
        return self._layers.concat(list(xs), len(xs[0].shape) - 1)

    def split_heads(self, x: ITensor, head_dim: int) -> ITensor:
        return self._layers.reshape(x, (-1, x.shape[-1] // head_dim, head_dim))

    def gather_rows(self, x: Handle, rows: ITensor) -> ITensor:
        return self._layers.gather(self._layers.tensor(x), self._layers.reshape(rows, (-1,)))

    def rope_table(self, rotary: Rotary, positions: ITensor) -> tuple[ITensor, ITensor]:
        cos, sin = self._rope_tables[rotary]
        layers = self._layers
        return layers.gather(layers.tensor(cos), positions), layers.gather(layers.tensor(sin), positions)

    def rope(self, x: ITensor, table: tuple[ITensor, ITensor]) -> ITensor:
        cos, sin = table  # [N, 1, rotary_dim], in x's dtype
        layers = self._layers
        if cos.shape[-1] < x.shape[-1]:
            rotated, kept = self.split(x, (cos.shape[-1], x.shape[-1] - cos.shape[-1]))
            return layers.concat((self.rope(rotated, table), kept), 2)
        half = x.shape[-1] // 2
        first, second = self.split(x, (half, half))
        turned = layers.concat((layers.unary("NEG", second), first), 2)
        return layers.binary("SUM", layers.binary("PROD", x, cos), layers.binary("PROD", turned, sin))

    def moe(self, x: ITensor, experts: Experts[Handle], moe: Moe, routed: ITensor | None = None) -> ITensor:
        assert isinstance(experts, StackedExperts)
        logits = self.linear(x if routed is None else routed, experts.router)
        return self._lowering.experts(x, logits, experts, moe)

    def exchanged_moe(
        self, x: ITensor, experts: Experts[Handle], moe: Moe, exchanged: ExchangedRows, routed: ITensor | None = None
    ) -> ITensor:
        """In shapes that the engine knows: all rows on all ranks."""
        routed = None if routed is None else self.all_gather_rows(routed, exchanged)
        part = self.moe(self.all_gather_rows(x, exchanged), experts, moe, routed)
        return self.reduce_scatter_rows(part, exchanged)

    def tempered(self, q: ITensor, rows: Rows[ITensor], temperature: QueryTemperature) -> ITensor:
        layers = self._layers
        intervals = layers.binary("DIV", layers.binary("SUM", rows.positions, 1), temperature.interval)
        growth = layers.unary("LOG", layers.binary("SUM", layers.cast(intervals, "float32"), 1.0))
        factors = layers.binary("SUM", layers.binary("PROD", growth, temperature.scale), 1.0)
        by_row = layers.reshape(factors, (-1, 1, 1))
        return layers.cast_like(layers.binary("PROD", layers.cast(q, "float32"), by_row), q)

    def token_rows(self) -> Rows[ITensor]:
        inputs = self._inputs
        return Rows(
            positions=inputs.positions,
            token_offsets=inputs.token_offsets,
            context_lens=inputs.context_lens,
            page_table=inputs.page_table,
            keeps_kv=True,
        )

    def attend(
        self,
        q: ITensor,
        k: ITensor | None,
        v: ITensor | None,
        rows: Rows[ITensor],
        cache: Cache[ITensor],
        gqa: Gqa,
        sinks: Handle | None = None,
    ) -> ITensor:
        if rows.keeps_kv:
            wide = None if sinks is None else self._layers.cast(self._layers.tensor(sinks), "float32")
            return self._lowering.attend_pages(q, None if k is None or v is None else (k, v), cache, gqa, wide)
        assert sinks is None and k is not None and v is not None, "drafters have none of those"
        store = self._stores.pop(cache.spec.name, None)
        context = None if store is None else store.kv
        return self._lowering.attend_draft(context, q, (k, v), cache, rows.context_lens, gqa)

    def gated_delta(
        self,
        qkvz: ITensor,
        ba: ITensor,
        parameters: DeltaParameters[Handle],
        rows: Rows[ITensor],
        cache: RecurrentCache[ITensor],
        spec: GatedDelta,
        eps: float,
    ) -> ITensor:
        assert rows.keeps_kv, "a draft block has no recurrent layers"
        tensors = {item.name: self._layers.tensor(getattr(parameters, item.name)) for item in fields(parameters)}
        return self._lowering.gated_delta(qkvz, ba, DeltaParameters(**tensors), cache, eps)

    def store_kv(
        self, kv: ITensor, layers: Sequence[KvDestination[ITensor]], rows: Rows[ITensor], limits: ITensor
    ) -> None:
        for layer, pair in zip(layers, rotated_kv(self, kv, layers), strict=True):
            self._stores[layer.cache.spec.name] = _Store(pair, limits, layer.cache)

    def state_outputs(self) -> Mapping[str, ITensor]:
        """Outputs besides the step's, after what no attention has stored along the way is stored."""
        for store in self._stores.values():
            self._lowering.write_draft_context(store.kv, store.cache, store.limits)
        self._stores.clear()
        return self._lowering.state_outputs()

    def sample_and_accept(self, logits: ITensor) -> Acceptance[ITensor]:
        return self._lowering.sample_and_accept(logits)

    def token_blocks(
        self, acceptance: Acceptance[ITensor], *, fill: int, drafts_from_anchor: bool = False
    ) -> TokenBlocks[ITensor]:
        layers, num_masks = self._layers, num_drafts(self._layers, self._inputs)
        num_requests = layers.dim(self._inputs.logit_rows, 0)
        width = num_masks if drafts_from_anchor else layers.dim(self._inputs.logit_rows, 1)
        slots = layers.reshape(layers.arange(width), (1, -1))
        anchors = layers.reshape(acceptance.bonus_tokens, (-1, 1))
        masks = layers.broadcast(layers.ints([fill], (1, 1)), (num_requests, num_masks))
        token_ids = layers.concat((anchors, masks), 1)
        if drafts_from_anchor:
            token_ids = layers.slice(token_ids, 1, 0, width)
        positions = layers.binary("SUM", layers.reshape(acceptance.next_context_lens, (-1, 1)), slots)
        rows = Rows(
            positions=layers.reshape(positions, (-1,)),
            token_offsets=None,
            context_lens=acceptance.next_context_lens,
            page_table=self._inputs.page_table,
            keeps_kv=False,
        )
        return TokenBlocks(token_ids=layers.reshape(token_ids, (-1,)), rows=rows)

    def all_reduce(self, x: ITensor) -> ITensor:
        return x if self._collectives is None else self._collectives.all_reduce(x)

    def all_gather_rows(self, x: ITensor, exchanged: ExchangedRows) -> ITensor:
        return x if self._shared_rows is None else self._shared_rows.all_gather(x)

    def reduce_scatter_rows(self, x: ITensor, exchanged: ExchangedRows) -> ITensor:
        return x if self._shared_rows is None else self._shared_rows.reduce_scatter(x)

    def all_gather_vocab(self, logits: ITensor, exchanged: ExchangedRows) -> ITensor:
        return self.gathered_columns(logits) if self._shared_rows is None else self._shared_rows.own_rows(logits)

    def gathered_columns(self, x: ITensor) -> ITensor:
        """[N, C] of each rank -> [N, ranks * C]."""
        if self._collectives is None:
            return x
        layers, shard, num_ranks = self._layers, x.shape[-1], self._collectives.num_ranks
        rows = layers.dim(x, 0)
        by_rank = layers.reshape(self._collectives.all_gather(x), (num_ranks, rows, shard))
        return layers.reshape(layers.transpose(by_rank, (1, 0, 2)), (rows, num_ranks * shard))


def _gelu_tanh(layers: Layers, x: ITensor) -> ITensor:
    """GELU in its approximation with tanh."""
    cube = layers.binary("PROD", x, layers.binary("PROD", x, x))
    inner = layers.binary("SUM", x, layers.binary("PROD", cube, _GELU_CUBE))
    weight = layers.binary("SUM", layers.tanh(layers.binary("PROD", inner, _GELU_SCALE)), 1.0)
    return layers.binary("PROD", layers.binary("PROD", x, 0.5), weight)
