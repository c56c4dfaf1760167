"""Canonical tensors (core/weight_spec.py) bound into the shapes the network code reads. No names after this file."""

from collections.abc import Callable
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec
from dflash_trt.formats.base import PackedWeight, slice_packed
from dflash_trt.network.ops import Experts, Linear, StackedExperts, T

_Weights = TypeVar("_Weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp(Generic[T]):
    """A dense gated MLP: gate_up is [gate; up] rows."""

    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights(Generic[T]):
    """One decoder layer apart from what produces q, k and v."""

    attention_norm: T
    q_norm: T | None
    k_norm: T | None
    o: Linear[T]
    mlp_norm: T
    mlp: Mlp[T] | Experts[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights(Generic[T]):
    embedding: T
    layers: tuple[LayerWeights[T], ...]
    qkv: tuple[Linear[T], ...]  # one per layer, [q; k; v] rows
    sinks: tuple[T | None, ...]  # one per layer, [heads]
    norm: T
    lm_head: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftWeights(Generic[T]):
    """`embedding` and `lm_head` are the target's unless the drafter brings its own."""

    embedding: T
    fc: Linear[T]
    context_norm: T
    layers: tuple[LayerWeights[T], ...]
    q: tuple[Linear[T], ...]  # one per layer
    context_kv: Linear[T]  # [k_0; v_0; k_1; v_1; ...] rows of all layers
    block_kv: tuple[Linear[T], ...]  # one per layer, [k_i; v_i]: slices of context_kv
    norm: T
    lm_head: Linear[T]
    draft_to_target: T | None


def bind_target(
    spec: TargetSpec,
    tensors: AbcMapping[str, T],
    mapping: Mapping,
    *,
    slice_rows: Callable[[T, int, int], T],
    packed: AbcMapping[str, PackedWeight[T]] | None = None,
) -> TargetWeights[T]:
    """`packed` holds the linears that are not plain tensors, the copy of a tied embedding as lm_head among them.

    `slice_rows(tensor, start, stop)` should not copy. Raises KeyError on a missing tensor: the engine directory has
    proven the table before.
    """
    packed = packed or {}
    embedding = tensors["target.embedding"]
    prefixes = [f"target.layers.{i}" for i in range(spec.num_layers)]
    if spec.is_embedding_tied and "target.lm_head" not in packed:
        lm_head = Linear(weight=_tied_head(spec, embedding, mapping, slice_rows), name="target.lm_head")
    else:
        lm_head = _linear("target.lm_head", tensors, packed)
    return TargetWeights(
        embedding=embedding,
        layers=tuple(
            _bind_layer(prefix, spec, tensors, packed, mapping, has_experts=spec.has_experts(i))
            for i, prefix in enumerate(prefixes)
        ),
        qkv=tuple(_linear(f"{prefix}.qkv", tensors, packed) for prefix in prefixes),
        sinks=tuple(tensors.get(f"{prefix}.sinks") for prefix in prefixes),
        norm=tensors["target.norm"],
        lm_head=lm_head,
    )


def bind_draft(
    spec: DraftSpec,
    target: TargetWeights[T],
    tensors: AbcMapping[str, T],
    mapping: Mapping,
    *,
    slice_rows: Callable[[T, int, int], T],
    packed: AbcMapping[str, PackedWeight[T]] | None = None,
) -> DraftWeights[T]:
    """`packed` as in `bind_target`; `slice_rows(tensor, start, stop)` should not copy.

    Raises KeyError on a missing tensor.
    """
    packed = packed or {}
    rows = 2 * spec.kv_size // mapping.tp_size
    context_kv = _linear("draft.kv", tensors, packed)
    block_kv = tuple(_sliced(context_kv, i * rows, (i + 1) * rows, slice_rows) for i in range(spec.num_layers))
    prefixes = [f"draft.layers.{i}" for i in range(spec.num_layers)]
    has_own_vocabulary = spec.draft_vocab_size is not None
    has_own_head = has_own_vocabulary or "draft.lm_head" in packed
    return DraftWeights(
        embedding=tensors["draft.embedding"] if spec.has_own_embedding else target.embedding,
        fc=_linear("draft.fc", tensors, packed),
        context_norm=tensors["draft.context_norm"],
        layers=tuple(_bind_layer(prefix, spec, tensors, packed, mapping) for prefix in prefixes),
        q=tuple(_linear(f"{prefix}.q", tensors, packed) for prefix in prefixes),
        context_kv=context_kv,
        block_kv=block_kv,
        norm=tensors["draft.norm"],
        lm_head=_linear("draft.lm_head", tensors, packed) if has_own_head else target.lm_head,
        draft_to_target=tensors["draft.draft_to_target"] if has_own_vocabulary else None,
    )


def _tied_head(spec: TargetSpec, embedding: T, mapping: Mapping, slice_rows: Callable[[T, int, int], T]) -> T:
    """Every rank holds the whole embedding; its rows of it are its head."""
    if mapping.tp_size == 1:
        return embedding
    num_rows = spec.vocab_size // mapping.tp_size
    return slice_rows(embedding, mapping.tp_rank * num_rows, (mapping.tp_rank + 1) * num_rows)


def _bind_layer(
    prefix: str,
    spec: DecoderSpec,
    tensors: AbcMapping[str, T],
    packed: AbcMapping[str, PackedWeight[T]],
    mapping: Mapping,
    *,
    has_experts: bool = False,
) -> LayerWeights[T]:
    return LayerWeights(
        attention_norm=tensors[f"{prefix}.attention_norm"],
        q_norm=tensors[f"{prefix}.q_norm"] if spec.has_qk_norm else None,
        k_norm=tensors[f"{prefix}.k_norm"] if spec.has_qk_norm else None,
        o=_summed(_linear(f"{prefix}.o", tensors, packed), mapping),
        mlp_norm=tensors[f"{prefix}.mlp_norm"],
        mlp=_experts(prefix, tensors, packed) if has_experts else _mlp(prefix, tensors, packed, mapping),
    )


def _mlp(
    prefix: str, tensors: AbcMapping[str, T], packed: AbcMapping[str, PackedWeight[T]], mapping: Mapping
) -> Mlp[T]:
    return Mlp(
        gate_up=_linear(f"{prefix}.gate_up", tensors, packed),
        down=_summed(_linear(f"{prefix}.down", tensors, packed), mapping),
    )


def _experts(prefix: str, tensors: AbcMapping[str, T], packed: AbcMapping[str, PackedWeight[T]]) -> StackedExperts[T]:
    return StackedExperts(
        router=_linear(f"{prefix}.router", tensors, packed),
        gate_up=tensors[f"{prefix}.experts.gate_up"],
        down=tensors[f"{prefix}.experts.down"],
        gate_up_bias=tensors.get(f"{prefix}.experts.gate_up_bias"),
        down_bias=tensors.get(f"{prefix}.experts.down_bias"),
    )


def _summed(linear: Linear[T], mapping: Mapping) -> Linear[T]:
    """A linear whose results the ranks add up: the bias must be added once, so only rank 0 keeps it."""
    return linear if mapping.tp_rank == 0 else replace(linear, bias=None)


def _linear(name: str, tensors: AbcMapping[str, T], packed: AbcMapping[str, PackedWeight[T]]) -> Linear[T]:
    weight = packed[name] if name in packed else tensors[name]
    return Linear(weight=weight, bias=tensors.get(f"{name}_bias"), name=name)


def _sliced(linear: Linear[T], start: int, stop: int, slice_rows: Callable[[T, int, int], T]) -> Linear[T]:
    weight: T | PackedWeight[T]
    if isinstance(linear.weight, PackedWeight):
        weight = slice_packed(linear.weight, start, stop, slice_rows)
    else:
        weight = slice_rows(linear.weight, start, stop)
    bias = None if linear.bias is None else slice_rows(linear.bias, start, stop)
    return Linear(weight=weight, bias=bias, name=linear.name, first_row=start)


def map_linears(weights: _Weights, change: Callable[[Linear[T]], Linear[T]]) -> _Weights:
    """The same weights with every Linear, however deep, replaced by `change` of it; tensors stay as they are."""
    return cast(_Weights, _mapped(weights, change))


def _mapped(value: Any, change: Callable[[Linear[T]], Linear[T]]) -> Any:
    if isinstance(value, Linear):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {item.name: _mapped(getattr(value, item.name), change) for item in fields(value)}
        return replace(value, **changes)
    return value
