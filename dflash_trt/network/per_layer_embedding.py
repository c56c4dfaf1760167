"""Per-layer embeddings: a layer adds a projection of its own part of a second embedding.

See `PerLayerEmbedding`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.network.ops import Linear, Ops, T
from dflash_trt.network.rank_tensors import RankTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerTable(Generic[T]):
    """The second embedding, of all layers of size P, and the projection of the first one."""

    embedding: T  # [V, layers * P]
    scale: float  # of its rows
    projection: Linear[T]  # [layers * P, H]
    norm: T  # [P]


@dataclass(frozen=True, kw_only=True, slots=True)
class PerLayerWeights(Generic[T]):
    """Weights of one layer."""

    gate: Linear[T]  # [P, H]
    projection: Linear[T]  # [H, P]
    norm: T  # [H]


def bind_per_layer_table(spec: TargetSpec, tensors: RankTensors[T]) -> PerLayerTable[T] | None:
    if spec.per_layer_embedding is None:
        return None
    return PerLayerTable(
        scale=spec.per_layer_embedding.size**0.5,
        embedding=tensors["target.per_layer.embedding"],
        projection=tensors.linear("target.per_layer.projection"),
        norm=tensors["target.per_layer.norm"],
    )


def bind_per_layer(tensors: RankTensors[T], prefix: str) -> PerLayerWeights[T]:
    return PerLayerWeights(
        gate=tensors.linear(f"{prefix}.per_layer_gate"),
        projection=tensors.linear(f"{prefix}.per_layer_projection"),
        norm=tensors[f"{prefix}.per_layer_norm"],
    )


def embedded_per_layer(
    ops: Ops[T],
    spec: TargetSpec,
    table: PerLayerTable[T],
    rows: T,  # [N, layers * P], of its embedding
    hidden: T,  # [N, H], the scaled embedding
) -> Sequence[T]:  # [N, P] for each layer
    assert spec.per_layer_embedding is not None
    size = spec.per_layer_embedding.size
    projected = ops.scale(ops.linear(hidden, table.projection), spec.hidden_size**-0.5)
    normed = ops.merge_heads(ops.rms_norm(ops.split_heads(projected, size), table.norm, spec.rms_norm_eps))
    return ops.split(ops.scale(ops.add(normed, rows), 2**-0.5), (size,) * spec.num_layers)


def run_per_layer(
    ops: Ops[T],
    weights: PerLayerWeights[T],
    hidden: T,  # [N, H]
    part: T,  # [N, P]
    eps: float,
) -> T:  # [N, H]
    gated = ops.gelu_mul(ops.concat((ops.linear(hidden, weights.gate), part)))
    return ops.rms_norm(ops.linear(gated, weights.projection), weights.norm, eps)
