"""A pair cut down to one layer of each kind, at full width: the smallest network with every kind.

Experts are alike, a leading axis of the same products: as many as one row needs stand for all. So do a few rows of a
table that is only read by row.
"""

from collections.abc import Mapping as AbcMapping
from dataclasses import replace
from typing import Any, Final

from dflash_trt.core.model.decoder import DecoderSpec, LayerSpec, TargetSpec
from dflash_trt.core.model.draft import DraftSpec
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.engine_dir import PretrainedConfig, TensorHeader

MIN_EXPERTS: Final = 8  # per rank
MAX_EMBEDDING_ROWS: Final = 4096


def one_of_each_kind(config: PretrainedConfig) -> PretrainedConfig:
    """The pair with the first layer of each kind.

    Taps move to the layers of the same kind, so `draft.fc` keeps its width.
    """
    linears = config.quantization.linears if config.quantization else {}
    target_kinds = layer_kinds(config.target, linears)
    draft_kinds: tuple[int, ...] = ()
    layers = tuple(with_few_experts(layer, config.mapping.ep_size) for layer in _chosen(config.target, target_kinds))
    target = config.target.model_copy(update={"layers": layers})
    draft: DraftSpec | None = None
    if config.draft is not None:
        draft_kinds = layer_kinds(config.draft, linears)
        kept = sorted(set(target_kinds))
        taps = tuple(kept.index(target_kinds[layer_id]) for layer_id in config.draft.target_layer_ids)
        chosen = _chosen(config.draft, draft_kinds)
        draft = config.draft.model_copy(
            update={
                "layers": tuple(with_few_experts(layer, config.mapping.ep_size) for layer in chosen),
                "target_layer_ids": taps,
                "num_target_layers": len(kept),
            }
        )
    quantization = config.quantization and QuantizationSpec(
        linears=_renamed(linears, {"target": target_kinds, "draft": draft_kinds}),
        target_kv=_chosen_scales(config.quantization.target_kv, target_kinds),
        draft_kv=_chosen_scales(config.quantization.draft_kv, draft_kinds),
    )
    return PretrainedConfig(
        target=target, draft=draft, dtype=config.dtype, mapping=config.mapping, quantization=quantization
    )


def with_few_experts(layer: LayerSpec, ep_size: int) -> LayerSpec:
    """The layer with no more experts than MIN_EXPERTS on each rank, or than a row chooses."""
    moe = layer.moe
    if moe is None:
        return layer
    on_each_rank = max(MIN_EXPERTS, -(-moe.num_experts_per_token // ep_size))
    num_experts = min(moe.num_experts, on_each_rank * ep_size)
    return layer.model_copy(update={"feed_forward": moe.model_copy(update={"num_experts": num_experts})})


def with_few_embedding_rows(headers: AbcMapping[str, TensorHeader], target: TargetSpec) -> dict[str, TensorHeader]:
    """The headers with at most MAX_EMBEDDING_ROWS of each embedding table, unless a head multiplies by it."""
    tables = {"draft.embedding", "target.per_layer.embedding"}
    if not target.is_embedding_tied:
        tables.add("target.embedding")
    return {
        name: replace(header, shape=(min(header.shape[0], MAX_EMBEDDING_ROWS), *header.shape[1:]))
        if name in tables
        else header
        for name, header in headers.items()
    }


def layer_kinds(spec: DecoderSpec, linears: AbcMapping[str, str]) -> tuple[int, ...]:
    """For each layer the first one of its kind: equal specs, and equal formats of its linear layers."""
    formats: list[dict[str, str]] = [{} for _ in spec.layers]
    for name, weight_format in linears.items():
        role, _, rest = name.partition(".layers.")
        if role == spec.role and rest:
            index, _, linear = rest.partition(".")
            formats[int(index)][linear] = weight_format
    first: dict[Any, int] = {}
    kinds = [(layer, frozenset(formats[i].items())) for i, layer in enumerate(spec.layers)]
    return tuple(first.setdefault(kind, i) for i, kind in enumerate(kinds))


def _chosen(spec: DecoderSpec, kinds: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    """The first layer of each kind; a layer without K and V shares the first layer of its owner's kind."""
    kept = sorted(set(kinds))

    def at_its_place(i: int, layer: LayerSpec) -> LayerSpec:
        owner = layer.mixer.state_owner(i)
        if owner == i:
            return layer
        mixer = layer.mixer.model_copy(update={"shares_kv_with": kept.index(kinds[owner])})
        return layer.model_copy(update={"mixer": mixer})

    return tuple(at_its_place(i, spec.layers[i]) for i in kept)


def _chosen_scales(
    scales: tuple[LayerKvScales, ...] | None, kinds: tuple[int, ...]
) -> tuple[LayerKvScales, ...] | None:
    return None if scales is None else tuple(scales[i] for i in sorted(set(kinds)))


def _renamed(linears: AbcMapping[str, str], kinds: AbcMapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Formats of the linear layers that are left, under their new names."""
    renamed = {}
    for name, weight_format in linears.items():
        role, _, rest = name.partition(".layers.")
        if rest:
            index, _, linear = rest.partition(".")
            kept = sorted(set(kinds[role]))
            if int(index) not in kept:
                continue
            name = f"{role}.layers.{kept.index(int(index))}.{linear}"
        renamed[name] = weight_format
    return renamed
