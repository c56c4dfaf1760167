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
    """`projections` are `Gqa.projections` as one matrix, or q and [k; v].

    A backend may hold them in a form of its own.
    """

    spec: Gqa
    projections: tuple[Linear[T], ...]
    q_norm: T | None  # [D], or joint [heads * D]
    k_norm: T | None
    sinks: T | None  # [heads]
    o: Linear[T]

    def run(self, ops: Ops[T], x: T, rows: Rows[T], cache: Cache[T], *, rope: Any, eps: float) -> T:
        gqa = self.spec
        if gqa.has_output_gate:
            heads, gate = self._gated_qkv(ops, x, rope, eps)
            attended = ops.sigmoid_mul(ops.attend(*heads, rows, cache, gqa, self.sinks), gate)
        else:
            q, k, v = self.qkv(ops, x, rope, eps)
            queries = q if gqa.temperature is None else ops.tempered(q, rows, gqa.temperature)
            attended = ops.attend(queries, k, v, rows, cache, gqa, self.sinks)
        return ops.linear(attended, self.o)

    def qkv(self, ops: Ops[T], x: T, rope: Any, eps: float) -> tuple[T, T | None, T | None]:
        """[N, H] -> q [N, heads, D], k and v [N, kv_heads, D], normed if the model does, q and k rotated."""
        gqa, q_norm, k_norm = self.spec, self.q_norm, self.k_norm
        q, *kv = self._projected(ops, x)
        if gqa.has_joint_qk_norm:
            assert q_norm is not None and k_norm is not None and len(kv) == len("kv")
            q, kv[0] = ops.joint_rms_norm(q, q_norm, eps), ops.joint_rms_norm(kv[0], k_norm, eps)
            q_norm = k_norm = None
        queries = rotated_heads(ops, q, gqa.head_dim, q_norm, eps, rope)
        if not kv:
            return queries, None, None
        v = ops.split_heads(kv[-1], gqa.head_dim)
        keys = rotated_heads(ops, kv[0], gqa.head_dim, k_norm, eps, rope)
        return queries, keys, ops.unweighted_rms_norm(v, eps) if gqa.has_v_norm else v

    def _projected(self, ops: Ops[T], x: T) -> Sequence[T]:
        """Rows of q, with a gate after each head where the model has gates, and of the layer's own k and v."""
        gqa = self.spec
        if len(self.projections) == 1:
            sizes = (gqa.q_rows, gqa.kv_size, gqa.kv_size)[: len(gqa.projections)]
            out = ops.linear(x, self.projections[0])
            return [out] if len(sizes) == 1 else ops.split(out, sizes)
        q, kv = (ops.linear(x, projection) for projection in self.projections)
        return (q, *ops.split(kv, (gqa.kv_size, gqa.kv_size)))

    def _gated_qkv(self, ops: Ops[T], x: T, rope: Any, eps: float) -> tuple[tuple[T, T, T], T]:
        """q, k and v as in `qkv`, and the gates [N, heads * D], which follow each head's query."""
        gqa = self.spec
        rows, k, v = self._projected(ops, x)
        q, gate = ops.split(ops.split_heads(rows, 2 * gqa.head_dim), (gqa.head_dim, gqa.head_dim))
        heads = (
            _rotated(ops, q, self.q_norm, eps, rope),
            rotated_heads(ops, k, gqa.head_dim, self.k_norm, eps, rope),
            ops.split_heads(v, gqa.head_dim),
        )
        return heads, ops.merge_heads(gate)


def bind(spec: Gqa, tensors: RankTensors[T], prefix: str, kv: Linear[T] | None = None) -> GqaWeights[T]:
    """`kv` is [k; v] if that is no part of the layer's own matrix."""
    q = tensors.linear(f"{prefix}.{spec.projections if kv is None else 'q'}")
    return GqaWeights(
        spec=spec,
        projections=(q,) if kv is None else (q, kv),
        q_norm=tensors.find(f"{prefix}.q_norm"),
        k_norm=tensors.find(f"{prefix}.k_norm"),
        sinks=tensors.find(f"{prefix}.sinks"),
        o=tensors.summed_linear(f"{prefix}.o"),
    )


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
