"""Work of an engine's step on each rank: products, K/V, activations, exchanges, calls of layers.

Weights are read once by each GEMM that uses them, K/V as far as a layer sees. Experts are chosen evenly and
independently. Counts only: `step_floor` and `step_costs` turn them into times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dflash_trt.core.dtype import num_bytes_of
from dflash_trt.core.expert_exchange import ExchangeCosts
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import DecoderSpec, LayerSpec
from dflash_trt.core.model.draft import DraftSpec, engine_weights
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.weight_spec import WeightSpec, is_linear, rank_shard
from dflash_trt.engine_dir import PretrainedConfig, tensor_headers
from dflash_trt.plan.attention_work import Mixing, MixingWork, mixings_of
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.exchanges import Exchange, Exchanges, RankRows

# Rows that a weight is multiplied with: tokens of the step, its rows of logits, the slots of draft blocks, the slots of
# a chain so far, its last slots, the drafts, a slot of DSpark's walk.
_TOKENS: Final = "tokens"
_LOGITS: Final = "logits"
_SLOTS: Final = "slots"
_CHAIN: Final = "chain"
_LAST: Final = "last"
_DRAFTS: Final = "drafts"
_WALK: Final = "walk"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A layer's experts, of all ranks, and the tokens of the step that choose among them."""

    hidden_size: int
    moe: Moe
    moe_tp_size: int
    ep_size: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Equal GEMMs: `elements` weights in all, each multiplied with `rows` rows.

    `format` None is unquantized. There are `count` GEMMs of `shape`, output and input features; or, of `experts`, so
    many layers, whose gate, up and down projections are counted together.
    """

    rows: float
    elements: float
    num_bytes: float
    format: str | None
    count: float = 1.0
    shape: tuple[int, int] | None = None
    experts: Experts | None = None

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.elements


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Work of each rank. `vector_bytes` are weights outside matrix products.

    `activation_bytes` are written and read by operators one by one, as PyTorch runs them; a floor omits them: they fit
    into the caches, and kernels fuse them. `num_layers` are calls of layers, `num_passes` passes of the drafter.
    """

    num_requests: int
    num_tokens: int
    products: tuple[Product, ...]
    vector_bytes: float
    kv_bytes: float
    mixing_flops: float  # scores and their products with V, or of recurrent states
    activation_bytes: float
    num_logits: int  # elements
    num_layers: int
    num_passes: int
    num_ranks: int = 1
    mixings: tuple[MixingWork, ...] = ()  # `kv_bytes` and `mixing_flops`, one by one
    exchanges: tuple[Exchange, ...] = ()

    @property
    def exchange_bytes(self) -> float:
        return sum(exchange.num_bytes for exchange in self.exchanges)

    @property
    def weights_bytes(self) -> float:
        return self.vector_bytes + sum(product.num_bytes for product in self.products)


def chosen_fraction(moe: Moe, num_rows: float) -> float:
    """Expected fraction of the experts that `num_rows` rows choose."""
    return 1.0 - math.pow(1.0 - moe.num_experts_per_token / moe.num_experts, num_rows)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Weights that are used alike."""

    rows: str
    format: str | None
    moe: Moe | None
    shape: tuple[int, int] | None  # of a GEMM
    is_product: bool
    is_of_all_rows: bool  # of all ranks


class EngineWork:
    """The work of an engine's steps, with or without its drafter. Made once: counting a step is cheap."""

    def __init__(
        self, config: PretrainedConfig, *, has_drafter: bool, exchange_costs: ExchangeCosts | None = None
    ) -> None:
        """By `exchange_costs` ranks with requests of their own exchange rows as an engine without TensorRT does."""
        self._config = config
        self._draft = config.draft if has_drafter else None
        self._itemsize = num_bytes_of(config.dtype)
        self._sums: dict[_Kind, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # elements, bytes and count
        self._count_weights()
        states = config.states()
        self._exchanges = Exchanges(config, has_drafter=has_drafter, costs=exchange_costs)
        self._mixings: list[Mixing] = list(mixings_of(config.target, states.target, config.mapping))
        if self._draft is not None:
            self._mixings += mixings_of(self._draft, states.draft, config.mapping)
        self._features = [
            sum(_moved_features(layer, decoder.hidden_size, config.mapping) for layer in decoder.layers)
            for decoder in self._decoders()
        ]

    def of(self, rows: ComputedRows, *, shared_tokens: int | None = None) -> StepWork:
        """The work of a step of these rows.

        Where ranks have requests of their own, `shared_tokens` are those of all ranks (default: all have as many).
        """
        num_requests, num_tokens = rows.num_requests, int(rows.num_tokens.sum())
        drafts, draft = rows.num_draft_tokens, self._draft
        num_passes = draft.num_passes(drafts) if draft is not None else 0
        slots = num_requests * (drafts + 1)
        computed_slots = draft.computed_slots(drafts) if draft is not None else 0
        uses = {
            _TOKENS: (num_tokens, 1),
            _LOGITS: (slots, 1),
            _SLOTS: (num_requests * computed_slots, num_passes),
            _CHAIN: (num_requests * (drafts + 1) / 2, num_passes),
            _LAST: (num_requests, num_passes),
            _DRAFTS: (num_requests * drafts / max(1, num_passes), num_passes),
            _WALK: (num_requests, drafts),
        }
        vocab_size = self._config.target.vocab_size
        draft_vocab_size = vocab_size if draft is None else draft.draft_vocab_size or vocab_size
        is_chain = draft is not None and draft.drafts_one_by_one
        draft_rows = num_requests if is_chain else num_requests * computed_slots
        layers = self._config.target.num_layers + (num_passes * draft.num_layers if draft is not None else 0)
        moved = num_tokens * self._features[0]
        if draft is not None:
            moved += num_passes * draft_rows * self._features[1]
        mixed = [mixing.of(rows, num_passes, computed_slots) for mixing in self._mixings]
        shared = num_tokens * self._config.mapping.dp_size if shared_tokens is None else shared_tokens
        has_prompts = bool((rows.num_tokens > drafts + 1).any()) or shared > slots * self._config.mapping.dp_size
        exchanged = RankRows(
            tokens=num_tokens,
            logits=slots,
            num_passes=num_passes,
            draft_layers=draft_rows,
            draft_embedding=num_requests * computed_slots if not is_chain else slots // 2,
            drafts=num_requests * drafts // max(1, num_passes),
            has_prompts=has_prompts,
        )
        return StepWork(
            num_requests=num_requests,
            num_tokens=num_tokens,
            products=tuple(self._products(uses, shared)),
            vector_bytes=sum(b * uses[k.rows][1] for k, (_, b, _) in self._sums.items() if not k.is_product),
            kv_bytes=sum(item.num_bytes for item in mixed),
            mixing_flops=sum(item.flops for item in mixed),
            activation_bytes=2.0 * moved * self._itemsize,
            num_logits=slots * vocab_size + num_requests * drafts * draft_vocab_size * bool(num_passes),
            num_layers=layers,
            num_passes=num_passes,
            num_ranks=self._config.mapping.world_size,
            mixings=tuple(mixed),
            exchanges=tuple(self._exchanges.of(exchanged, shared)),
        )

    def _products(self, uses: dict[str, tuple[float, int]], shared_tokens: int) -> Iterator[Product]:
        mapping, hidden_size = self._config.mapping, self._config.target.hidden_size
        for kind, (elements, num_bytes, count) in self._sums.items():
            rows, times = uses[kind.rows]
            if not kind.is_product or not times:
                continue
            part, experts = 1.0, None
            if kind.is_of_all_rows:
                rows = shared_tokens if kind.rows == _TOKENS else rows * mapping.dp_size
            if kind.moe is not None:
                experts = Experts(
                    hidden_size=hidden_size,
                    moe=kind.moe,
                    moe_tp_size=mapping.moe_tp_size,
                    ep_size=mapping.ep_size,
                    num_tokens=round(rows),
                )
                part = chosen_fraction(kind.moe, rows)
                rows *= kind.moe.num_experts_per_token / (kind.moe.num_experts * part)
            yield Product(
                rows=rows,
                elements=part * times * elements,
                num_bytes=part * times * num_bytes,
                format=kind.format,
                count=times * count,
                shape=kind.shape,
                experts=experts,
            )

    def _decoders(self) -> list[DecoderSpec]:
        return [self._config.target, *([self._draft] if self._draft is not None else [])]

    def _count_weights(self) -> None:
        """Every use of a weight in a step. The rows of embeddings that the tokens name are too few to count."""
        config = self._config
        whole = engine_weights(config.target, config.draft, config.quantization)
        table = {name: rank_shard(spec, config.mapping) for name, spec in whole.items()}
        sizes = _bytes_by_weight(config, table)
        experts = {name: moe for decoder in self._decoders() for name, moe in _experts_of(decoder).items()}
        for name, spec in table.items():
            if name.endswith((".embedding", "lm_head")) or spec.is_integer:
                continue
            moe = experts.get(name.rpartition(".")[0]) if spec.num_experts else None
            if not name.startswith("draft."):
                self._add(name, _TOKENS, spec, sizes[name], moe=moe)
            elif self._draft is not None:
                for rows in _draft_rows(name, self._draft):
                    self._add(name, rows, spec, sizes[name], moe=moe)
        heads = [("target.lm_head", _LOGITS)] + ([("draft.lm_head", _DRAFTS)] if self._draft is not None else [])
        for name, rows in heads:
            name = next((known for known in (name, "target.lm_head") if known in table), "target.embedding")
            # A rank reads its part of the rows of tied embeddings.
            part = 1 / config.mapping.tp_size if name == "target.embedding" else 1.0
            self._add(name, rows, table[name], sizes[name], part=part)

    def _add(
        self, name: str, rows: str, spec: WeightSpec, num_bytes: int, *, moe: Moe | None = None, part: float = 1.0
    ) -> None:
        quantization = self._config.quantization
        is_product = is_linear(spec, name) or name == "target.embedding"
        kind = _Kind(
            rows=rows,
            format=None if quantization is None else quantization.linears.get(name),
            moe=moe,
            shape=(round(part * spec.shape[0]), spec.shape[1]) if is_product and moe is None else None,
            is_product=is_product or moe is not None,
            is_of_all_rows=self._config.mapping.dp_size > 1 and (moe is not None or spec.divided_by != "group"),
        )
        sums = self._sums[kind]
        sums[0] += part * math.prod(spec.shape) * (is_linear(spec, name) or moe is None)
        sums[1] += part * num_bytes
        sums[2] += moe is None or name.endswith(".gate_up")


def _draft_rows(name: str, draft: DraftSpec) -> Iterator[str]:
    """A chain uses its layer for each draft, its feed-forward and norm on a row of each request.

    An MTP head projects the rows of its layer's input, whether of the context or of a draft.
    """
    is_of_input = name.startswith(("draft.fc", "draft.context_norm", "draft.embedding_norm"))
    if is_of_input or name == "draft.kv":
        yield _TOKENS
    if is_of_input and draft.mtp is None:
        return
    if name.startswith("draft.markov."):
        yield _WALK
        return
    if name.startswith("draft.confidence"):
        yield _DRAFTS
        return
    if not draft.drafts_one_by_one:
        yield _SLOTS
    else:
        yield _CHAIN if is_of_input or name == "draft.kv" or name.endswith((".q", ".o")) else _LAST


def _experts_of(decoder: DecoderSpec) -> dict[str, Moe]:
    return {
        f"{decoder.role}.layers.{i}.experts": moe
        for i, layer in enumerate(decoder.layers)
        if (moe := layer.moe) is not None
    }


def _bytes_by_weight(config: PretrainedConfig, table: dict[str, WeightSpec]) -> dict[str, int]:
    """Codes and scales of a weight together."""
    sizes = dict.fromkeys(table, 0)
    for name, header in tensor_headers(config).items():
        sizes[name if name in sizes else name.rpartition(".")[0]] += header.num_bytes
    return sizes


def _moved_features(layer: LayerSpec, hidden_size: int, mapping: Mapping) -> int:
    """Elements per token that a layer writes and reads once, in attention or in its feed-forward, if more."""
    mixed, fed = layer.mixer.shard(mapping).moved_features, layer.feed_forward.moved_features(hidden_size, mapping)
    return 2 * hidden_size + max(mixed, fed)
