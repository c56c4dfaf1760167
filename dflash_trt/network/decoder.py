"""A stack of pre-norm residual layers, as data. Knows nothing of drafts, sampling or stored state."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from dflash_trt.core.model.decoder import DecoderSpec, TargetSpec
from dflash_trt.network.feed_forward import FeedForward, bind_feed_forward
from dflash_trt.network.mixers.base import Mixer, bind_mixer
from dflash_trt.network.ops import OF_TOKENS, ExchangedRows, Linear, Ops, Rows, T
from dflash_trt.network.per_layer_embedding import (
    PerLayerTable,
    PerLayerWeights,
    bind_per_layer,
    bind_per_layer_table,
    embedded_per_layer,
    run_per_layer,
)
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import LayerCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer(Generic[T]):
    """One layer of one rank. `rope_index` counts distinct rotary embeddings; None in a layer without one."""

    feeds_norms_to_linears: ClassVar[bool] = True  # a factor of the one may move to the other

    rope_index: int | None
    attention_norm: T
    mixer: Mixer[T]
    mlp_norm: T
    feed_forward: FeedForward[T]
    attention_post_norm: T | None = None
    mlp_post_norm: T | None = None
    output_scale: T | None = None  # [1]
    per_layer: PerLayerWeights[T] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights(Generic[T]):
    embedding: T
    embedding_scale: float
    per_layer_embedding: PerLayerTable[T] | None
    layers: tuple[Layer[T], ...]
    norm: T
    lm_head: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRun(Generic[T]):
    """Outputs of the target's layers for the rest of a step.

    Nothing else stays, as long prompts are large.
    """

    hidden: T  # [N, H], of the last layer
    taps: Sequence[T]  # [N, H], of the layers that the drafter observes
    rows: Rows[T]  # that they ran over


def bind_layer(tensors: RankTensors[T], decoder: DecoderSpec, index: int) -> Layer[T]:
    """Raises KeyError on a missing tensor."""
    mixer = decoder.layers[index].mixer.shard(tensors.mapping)
    return Layer(
        mixer=bind_mixer(mixer, tensors, f"{decoder.role}.layers.{index}"), **bind_around_mixer(tensors, decoder, index)
    )


def bind_around_mixer(tensors: RankTensors[T], decoder: DecoderSpec, index: int) -> dict[str, Any]:
    """The fields of a `Layer`, except its mixer."""
    spec, prefix = decoder.layers[index], f"{decoder.role}.layers.{index}"
    rotary = spec.mixer.rotary
    return {
        "rope_index": None if rotary is None else decoder.rotaries.index(rotary),
        "attention_norm": tensors[f"{prefix}.attention_norm"],
        "mlp_norm": tensors[f"{prefix}.mlp_norm"],
        "feed_forward": bind_feed_forward(spec.feed_forward, tensors, prefix),
        "attention_post_norm": tensors.find(f"{prefix}.attention_post_norm"),
        "mlp_post_norm": tensors.find(f"{prefix}.mlp_post_norm"),
        "output_scale": tensors.find(f"{prefix}.output_scale"),
        "per_layer": None if spec.per_layer_size is None else bind_per_layer(tensors, prefix),
    }


def bind_target(spec: TargetSpec, tensors: RankTensors[T]) -> TargetWeights[T]:
    """Raises KeyError on a missing tensor."""
    has_head = not spec.is_embedding_tied or "target.lm_head" in tensors.quantized
    return TargetWeights(
        embedding=tensors["target.embedding"],
        embedding_scale=spec.embedding_scale,
        per_layer_embedding=bind_per_layer_table(spec, tensors),
        layers=tuple(bind_layer(tensors, spec, i) for i in range(spec.num_layers)),
        norm=tensors["target.norm"],
        lm_head=tensors.linear("target.lm_head") if has_head else _tied_head(spec, tensors),
    )


def run_target(
    ops: Ops[T],
    spec: TargetSpec,
    weights: TargetWeights[T],
    token_ids: T,
    rows: Rows[T],
    caches: Sequence[LayerCache[T]],
) -> Iterator[T]:
    """Outputs [T, H] of one layer after the other, for all tokens of the step, causally over their pages."""
    hidden = embedded(ops, weights.embedding, token_ids, weights.embedding_scale, OF_TOKENS)
    table, parts = weights.per_layer_embedding, None
    if table is not None:
        rows_by_layer = embedded(ops, table.embedding, token_ids, table.scale, OF_TOKENS)
        parts = embedded_per_layer(ops, spec, table, rows_by_layer, hidden)
    return run_layers(ops, spec, weights.layers, hidden, rows, caches, parts)


def run_layers(
    ops: Ops[T],
    spec: DecoderSpec,
    layers: Sequence[Layer[T]],
    hidden: T,
    rows: Rows[T],
    caches: Sequence[LayerCache[T]],
    per_layer: Sequence[T] | None = None,  # [N, per_layer_size]
    *,
    exchanged: ExchangedRows = OF_TOKENS,
) -> Iterator[T]:
    """Outputs [N, H] of one layer after the other, see `LayerSpec`."""
    eps = spec.rms_norm_eps
    ropes = rope_tables(ops, layers, rows)
    for i, (layer, cache, rope) in enumerate(zip(layers, caches, ropes, strict=True)):
        x = ops.rms_norm(hidden, layer.attention_norm, eps)
        x = layer.mixer.run(ops, x, rows, cache, rope=rope, eps=eps)
        hidden = ops.add(hidden, _normed(ops, ops.all_reduce(x), layer.attention_post_norm, eps))
        x = layer.feed_forward.run(ops, hidden, layer.mlp_norm, eps, exchanged)
        hidden = ops.add(hidden, _normed(ops, x, layer.mlp_post_norm, eps))
        if layer.per_layer is not None and per_layer is not None:
            hidden = ops.add(hidden, run_per_layer(ops, layer.per_layer, hidden, per_layer[i], eps))
        if layer.output_scale is not None:
            hidden = ops.mul(hidden, layer.output_scale)
        yield hidden


def last_of(outputs: Iterator[T]) -> T:
    """The last layer's output; no other is kept."""
    [output] = deque(outputs, maxlen=1)
    return output


def _normed(ops: Ops[T], x: T, norm: T | None, eps: float) -> T:
    return x if norm is None else ops.rms_norm(x, norm, eps)


def rope_tables(ops: Ops[T], layers: Sequence[Layer[T]], rows: Rows[T]) -> list[Any]:
    """One for each layer, None without RoPE; layers with the same rotary embedding share theirs."""
    tables: dict[int | None, Any] = {None: None}
    for layer in layers:
        if layer.rope_index not in tables and (rotary := layer.mixer.spec.rotary) is not None:
            tables[layer.rope_index] = ops.rope_table(rotary, rows.positions)
    return [tables[layer.rope_index] for layer in layers]


def embedded(ops: Ops[T], table: T, token_ids: T, scale: float, exchanged: ExchangedRows) -> T:
    """Token ids [N] -> [N, H]. Ranks with requests of their own each have a part of the vocabulary."""
    rows = ops.embedding(table, ops.all_gather_rows(token_ids, exchanged), scale)
    return ops.reduce_scatter_rows(rows, exchanged)


def head_logits(ops: Ops[T], x: T, head: Linear[T], exchanged: ExchangedRows) -> T:
    """Normed [N, H] -> [N, V], of a head that all ranks divide by vocabulary."""
    return ops.all_gather_vocab(ops.linear(ops.all_gather_rows(x, exchanged), head), exchanged)


def logits_of(
    ops: Ops[T], weights: TargetWeights[T], spec: TargetSpec, hidden: T, exchanged: ExchangedRows = OF_TOKENS
) -> T:
    """Final norm, lm_head and soft cap: [N, H] -> [N, V]."""
    logits = head_logits(ops, ops.rms_norm(hidden, weights.norm, spec.rms_norm_eps), weights.lm_head, exchanged)
    return logits if spec.logit_softcap is None else ops.softcap(logits, spec.logit_softcap)


def _tied_head(spec: TargetSpec, tensors: RankTensors[T]) -> Linear[T]:
    """Every rank of a group holds the group's part of the embedding; its rows of it are its head."""
    embedding = Linear(weight=tensors["target.embedding"], name="target.lm_head")
    tp_size, tp_rank = tensors.mapping.tp_size, tensors.mapping.tp_rank
    if tp_size == 1:
        return embedding
    num_rows = spec.vocab_size // tp_size
    return tensors.rows_of(embedding, tp_rank * num_rows, (tp_rank + 1) * num_rows)
