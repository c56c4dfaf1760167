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

    spec: Mla
    q_a: Linear[T] | None
    q_a_norm: T | None
    q_b: Linear[T]
    kv_a: Linear[T]
    kv_a_norm: T
    kv_b: T  # [heads * (nope_dim + v_head_dim), latent_dim]
    o: Linear[T]

    def run(self, ops: Ops[T], x: T, rows: Rows[T], cache: LatentCache[T], *, rope: Any, eps: float) -> T:
        mla = self.spec
        heads = ops.split_heads(self._queries(ops, x), mla.nope_dim + mla.rope_dim)
        q_nope, q_rope = ops.split(heads, (mla.nope_dim, mla.rope_dim))
        latent, k_rope = ops.split(ops.linear(x, self.kv_a), (mla.latent_dim, mla.rope_dim))
        latent = ops.rms_norm(latent, self.kv_a_norm, mla.latent_eps)
        q_rope = self._rotated(ops, q_rope, rope)
        k_rope = self._rotated(ops, ops.split_heads(k_rope, mla.rope_dim), rope)
        attended = ops.attend_latent(q_nope, q_rope, latent, k_rope, self.kv_b, rows, cache, mla)
        return ops.linear(attended, self.o)

    def _queries(self, ops: Ops[T], x: T) -> T:
        if self.q_a is not None:
            assert self.q_a_norm is not None
            x = ops.rms_norm(ops.linear(x, self.q_a), self.q_a_norm, self.spec.latent_eps)
        return ops.linear(x, self.q_b)

    def _rotated(self, ops: Ops[T], heads: T, rope: Any) -> T:
        """Pairs come out as halves, for q and k alike: their products do not change."""
        return ops.rope(ops.pairs_to_halves(heads) if self.spec.has_paired_rope else heads, rope)


def bind(spec: Mla, tensors: RankTensors[T], prefix: str) -> MlaWeights[T]:
    return MlaWeights(
        spec=spec,
        q_a=None if spec.q_rank is None else tensors.linear(f"{prefix}.q_a"),
        q_a_norm=tensors.find(f"{prefix}.q_a_norm"),
        q_b=tensors.linear(f"{prefix}.q_b"),
        kv_a=tensors.linear(f"{prefix}.kv_a"),
        kv_a_norm=tensors[f"{prefix}.kv_a_norm"],
        kv_b=tensors[f"{prefix}.kv_b"],
        o=tensors.summed_linear(f"{prefix}.o"),
    )
