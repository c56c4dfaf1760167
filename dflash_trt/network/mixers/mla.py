"""Multi-head latent attention: projections around one op, which attends over latents."""

from dataclasses import dataclass
from typing import Any, Generic

from dflash_trt.core.model.mla import Mla
from dflash_trt.network.ops import Linear, Ops, Rows, T
from dflash_trt.network.rank_tensors import RankTensors
from dflash_trt.network.state import LatentCache


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaWeights(Generic[T]):
    """See `Mla.weights`. `q_a` is there where q has a latent."""

    q_a: Linear[T] | None
    q_a_norm: T | None
    q_b: Linear[T]
    kv_a: Linear[T]
    kv_a_norm: T
    kv_b: T  # [heads * (nope_dim + v_head_dim), latent_dim]
    o: Linear[T]


def bind_mla(mla: Mla, tensors: RankTensors[T], prefix: str) -> MlaWeights[T]:
    return MlaWeights(
        q_a=None if mla.q_rank is None else tensors.linear(f"{prefix}.q_a"),
        q_a_norm=tensors.find(f"{prefix}.q_a_norm"),
        q_b=tensors.linear(f"{prefix}.q_b"),
        kv_a=tensors.linear(f"{prefix}.kv_a"),
        kv_a_norm=tensors[f"{prefix}.kv_a_norm"],
        kv_b=tensors[f"{prefix}.kv_b"],
        o=tensors.summed_linear(f"{prefix}.o"),
    )


def run_mla(
    ops: Ops[T],
    mla: Mla,
    weights: MlaWeights[T],
    x: T,  # [N, H], normed
    rows: Rows[T],
    cache: LatentCache[T],
    *,
    rope: Any,  # of `Ops.rope_table`
) -> T:  # [N, H], of one rank: to be summed
    heads = ops.split_heads(_queries(ops, mla, weights, x), mla.nope_dim + mla.rope_dim)
    q_nope, q_rope = ops.split(heads, (mla.nope_dim, mla.rope_dim))
    latent, k_rope = ops.split(ops.linear(x, weights.kv_a), (mla.latent_dim, mla.rope_dim))
    latent = ops.rms_norm(latent, weights.kv_a_norm, mla.latent_eps)
    q_rope = _rotated(ops, mla, q_rope, rope)
    k_rope = _rotated(ops, mla, ops.split_heads(k_rope, mla.rope_dim), rope)
    attended = ops.attend_latent(q_nope, q_rope, latent, k_rope, weights.kv_b, rows, cache, mla)
    return ops.linear(attended, weights.o)


def _queries(ops: Ops[T], mla: Mla, weights: MlaWeights[T], x: T) -> T:
    if weights.q_a is not None:
        assert weights.q_a_norm is not None
        x = ops.rms_norm(ops.linear(x, weights.q_a), weights.q_a_norm, mla.latent_eps)
    return ops.linear(x, weights.q_b)


def _rotated(ops: Ops[T], mla: Mla, heads: T, rope: Any) -> T:
    """Pairs come out as halves, for q and k alike: their products do not change."""
    return ops.rope(ops.pairs_to_halves(heads) if mla.has_paired_rope else heads, rope)
