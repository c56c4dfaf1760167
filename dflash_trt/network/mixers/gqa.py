"""Grouped-query attention with rotary embedding, over paged K/V."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic

from dflash_trt.core.model.gqa import Gqa
from dflash_trt.network.ops import KvDestination, Linear, Ops, Rows, T
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class GqaWeights(Generic[T]):
    """`projections` are those of `Gqa.projections` as one matrix, or q and [k; v]. A backend may hold them in a form of
    its own.
    """

    projections: tuple[Linear[T], ...]
    q_norm: T | None  # [D], or joint [heads * D]
    k_norm: T | None
    sinks: T | None  # [heads]
    o: Linear[T]

    def qkv(self, ops: Ops[T], gqa: Gqa, x: T, rope: Any, eps: float) -> tuple[T, T | None, T | None]:
        """[N, H] -> q [N, heads, D], k and v [N, kv_heads, D]; all normed where the model does, q and k rotated."""
        q, *kv = _projected(ops, gqa, self, x)
        q_norm, k_norm = self.q_norm, self.k_norm
        if gqa.has_joint_qk_norm:
            assert q_norm is not None and k_norm is not None and len(kv) == len("kv")
            q, kv[0] = ops.joint_rms_norm(q, q_norm, eps), ops.joint_rms_norm(kv[0], k_norm, eps)
            q_norm = k_norm = None
        queries = rotated_heads(ops, q, gqa.head_dim, q_norm, eps, rope)
        if not kv:
            return queries, None, None
        v = ops.split_heads(kv[-1], gqa.head_dim)
        keys = rotated_heads(ops, kv[0], gqa.head_dim, k_norm, eps, rope)
        return queries, keys, ops.rms_norm(v, None, eps) if gqa.has_v_norm else v


def bind_gqa(tensors: RankTensors[T], prefix: str, projections: str, *, kv: Linear[T] | None = None) -> GqaWeights[T]:
    """`projections` are those of the layer's own matrix; `kv` is the [k; v] of one whose matrix is not its own."""
    q = tensors.linear(f"{prefix}.{projections if kv is None else 'q'}")
    return GqaWeights(
        projections=(q,) if kv is None else (q, kv),
        q_norm=tensors.find(f"{prefix}.q_norm"),
        k_norm=tensors.find(f"{prefix}.k_norm"),
        sinks=tensors.find(f"{prefix}.sinks"),
        o=tensors.summed_linear(f"{prefix}.o"),
    )


def run_gqa(
    ops: Ops[T],
    gqa: Gqa,
    weights: GqaWeights[T],
    x: T,  # [N, H], normed
    rows: Rows[T],
    cache: Cache[T],
    *,
    rope: Any,  # of `Ops.rope_table`
    eps: float,
) -> T:  # [N, H], of one rank: to be summed
    if gqa.has_output_gate:
        heads, gate = _gated_qkv(ops, gqa, weights, x, rope, eps)
        attended = ops.sigmoid_mul(ops.attend(*heads, rows, cache, gqa, weights.sinks), gate)
    else:
        q, k, v = weights.qkv(ops, gqa, x, rope, eps)
        queries = q if gqa.temperature is None else ops.tempered(q, rows, gqa.temperature)
        attended = ops.attend(queries, k, v, rows, cache, gqa, weights.sinks)
    return ops.linear(attended, weights.o)


def _gated_qkv(ops: Ops[T], gqa: Gqa, weights: GqaWeights[T], x: T, rope: Any, eps: float) -> tuple[tuple[T, T, T], T]:
    """q, k and v as of `GqaWeights.qkv`, and the gates [N, heads * D], which stand behind the query of each head."""
    rows, k, v = ops.split(ops.linear(x, weights.projections[0]), (gqa.q_rows, gqa.kv_size, gqa.kv_size))
    q, gate = ops.split(ops.split_heads(rows, 2 * gqa.head_dim), (gqa.head_dim, gqa.head_dim))
    heads = (
        _rotated(ops, q, weights.q_norm, eps, rope),
        rotated_heads(ops, k, gqa.head_dim, weights.k_norm, eps, rope),
        ops.split_heads(v, gqa.head_dim),
    )
    return heads, ops.merge_heads(gate)


def rotated_heads(ops: Ops[T], x: T, head_dim: int, norm: T | None, eps: float, rope: Any) -> T:
    """Queries or keys, [N, heads * D] -> normed (where the model does) and rotated [N, heads, D]."""
    return _rotated(ops, ops.split_heads(x, head_dim), norm, eps, rope)


def _rotated(ops: Ops[T], heads: T, norm: T | None, eps: float, rope: Any) -> T:  # [N, heads, D]
    return ops.rope(heads if norm is None else ops.rms_norm(heads, norm, eps), rope)


def rotated_kv(ops: Ops[T], kv: T, layers: Sequence[KvDestination[T]]) -> list[tuple[T, T]]:
    """The first half of `Ops.store_kv` in terms of other ops: k and v of each layer, [N, kv_heads, D]."""
    sizes = [layer.cache.spec.num_kv_heads * layer.cache.spec.head_dim for layer in layers for _ in "kv"]
    parts = ops.split(kv, sizes)
    return [
        (
            rotated_heads(ops, k, layer.cache.spec.head_dim, layer.k_norm, layer.eps, layer.rope),
            ops.split_heads(v, layer.cache.spec.head_dim),
        )
        for layer, k, v in zip(layers, parts[::2], parts[1::2], strict=True)
    ]


def _projected(ops: Ops[T], gqa: Gqa, weights: GqaWeights[T], x: T) -> Sequence[T]:
    kv_size = gqa.kv_size
    if len(weights.projections) == 1:
        sizes = (gqa.q_size, kv_size, kv_size)[: len(gqa.projections)]
        out = ops.linear(x, weights.projections[0])
        return [out] if len(sizes) == 1 else ops.split(out, sizes)
    q, kv = (ops.linear(x, projection) for projection in weights.projections)
    return (q, *ops.split(kv, (kv_size, kv_size)))
