"""Canonical tensors (core/weight_spec.py) bound into the shapes the network code reads. No names after this file."""

from collections.abc import Callable
from collections.abc import Mapping as AbcMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model_spec import DecoderSpec, DraftSpec, TargetSpec
from dflash_trt.network.ops import Linear, T

_Weights = TypeVar("_Weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights(Generic[T]):
    """One decoder layer apart from what produces q, k and v."""

    attention_norm: T
    q_norm: T | None
    k_norm: T | None
    o: Linear[T]
    mlp_norm: T
    gate_up: Linear[T]
    down: Linear[T]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetWeights(Generic[T]):
    embedding: T
    layers: tuple[LayerWeights[T], ...]
    qkv: tuple[Linear[T], ...]  # one per layer, [q; k; v] rows
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


def bind_target(spec: TargetSpec, tensors: AbcMapping[str, T]) -> TargetWeights[T]:
    """Raises KeyError on a missing tensor: the engine directory has proven the table before."""
    embedding = tensors["target.embedding"]
    head = embedding if spec.is_embedding_tied else tensors["target.lm_head"]
    prefixes = [f"target.layers.{i}" for i in range(spec.num_layers)]
    return TargetWeights(
        embedding=embedding,
        layers=tuple(_bind_layer(prefix, spec, tensors) for prefix in prefixes),
        qkv=tuple(_linear(f"{prefix}.qkv", tensors) for prefix in prefixes),
        norm=tensors["target.norm"],
        lm_head=Linear(weight=head),
    )


def bind_draft(
    spec: DraftSpec,
    target: TargetWeights[T],
    tensors: AbcMapping[str, T],
    mapping: Mapping,
    *,
    slice_rows: Callable[[T, int, int], T],
) -> DraftWeights[T]:
    """Raises KeyError on a missing tensor. `slice_rows(tensor, start, stop)` should not copy."""
    rows = 2 * spec.kv_size // mapping.tp_size
    context_kv = _linear("draft.kv", tensors)
    bias = context_kv.bias
    block_kv = tuple(
        Linear(
            weight=slice_rows(context_kv.weight, i * rows, (i + 1) * rows),
            bias=None if bias is None else slice_rows(bias, i * rows, (i + 1) * rows),
        )
        for i in range(spec.num_layers)
    )
    prefixes = [f"draft.layers.{i}" for i in range(spec.num_layers)]
    has_own_head = spec.draft_vocab_size is not None
    return DraftWeights(
        embedding=tensors["draft.embedding"] if spec.has_own_embedding else target.embedding,
        fc=Linear(weight=tensors["draft.fc"]),
        context_norm=tensors["draft.context_norm"],
        layers=tuple(_bind_layer(prefix, spec, tensors) for prefix in prefixes),
        q=tuple(_linear(f"{prefix}.q", tensors) for prefix in prefixes),
        context_kv=context_kv,
        block_kv=block_kv,
        norm=tensors["draft.norm"],
        lm_head=Linear(weight=tensors["draft.lm_head"]) if has_own_head else target.lm_head,
        draft_to_target=tensors["draft.draft_to_target"] if has_own_head else None,
    )


def _bind_layer(prefix: str, spec: DecoderSpec, tensors: AbcMapping[str, T]) -> LayerWeights[T]:
    return LayerWeights(
        attention_norm=tensors[f"{prefix}.attention_norm"],
        q_norm=tensors[f"{prefix}.q_norm"] if spec.has_qk_norm else None,
        k_norm=tensors[f"{prefix}.k_norm"] if spec.has_qk_norm else None,
        o=_linear(f"{prefix}.o", tensors),
        mlp_norm=tensors[f"{prefix}.mlp_norm"],
        gate_up=_linear(f"{prefix}.gate_up", tensors),
        down=_linear(f"{prefix}.down", tensors),
    )


def _linear(name: str, tensors: AbcMapping[str, T]) -> Linear[T]:
    return Linear(weight=tensors[name], bias=tensors.get(f"{name}_bias"))


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
