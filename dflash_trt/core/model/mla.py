"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its parameters, weights and state.

K and V of all heads are linear in one latent c of each token, and one rotated key is shared by all heads:

    k_h = [Bk_h c | k_rope], v_h = Bv_h c, score = [q_nope | q_rope] . k_h
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import Scale, Size
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.mixer import Mixer, MixerFlops
from dflash_trt.core.model.rope import RopeSpec, Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import PagedLatent
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, row_sharded


class Mla(Mixer):
    """One layer of multi-head latent attention.

    `q_rank` is the size of q's latent, None where q comes from the hidden state. `latent_eps` is the epsilon of both
    latents' norms. With `has_paired_rope`, RoPE is interleaved: it rotates (0, 1), (2, 3), ... instead of halves.
    """

    mask: ClassVar[AttentionMask] = AttentionMask()

    kind: Literal["mla"] = "mla"
    num_heads: Size
    q_rank: Size | None = None
    latent_dim: Size
    nope_dim: Size  # per head of q and k, without RoPE
    rope_dim: Annotated[Size, Field(multiple_of=2)]  # per head of q, and of the key that all heads share
    v_head_dim: Size
    rope: RopeSpec
    scale: Scale
    latent_eps: Annotated[float, Field(ge=1e-12, le=0.1)] = 1e-6
    has_paired_rope: bool = True

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.v_head_dim

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rope, self.rope_dim)

    @property
    def sharded_sizes(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}

    def shard(self, mapping: Mapping) -> "Mla":
        """One rank's shard: its heads, and all of the latents."""
        return self.model_copy(update={"num_heads": self.num_heads // mapping.tp_size})

    def state(self, name: str, dtype: FloatDType, scales: LayerKvScales | None = None, **_: object) -> PagedLatent:
        """Pages of the layer: FP8 with scales, `dtype` without."""
        return PagedLatent(
            name=name,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            dtype=dtype if scales is None else "float8_e4m3fn",
            scales=scales,
        )

    @property
    def flops(self) -> tuple[MixerFlops, MixerFlops]:
        """Absorbed, with scores over latents; or over K and V made of every latent once."""
        head = self.nope_dim + self.v_head_dim
        factors = 2 * self.num_heads * head * self.latent_dim
        absorbed = MixerFlops(per_key=2 * self.num_heads * (2 * self.latent_dim + self.rope_dim), per_token=factors)
        return absorbed, MixerFlops(per_key=2 * self.num_heads * (head + self.rope_dim), per_position=factors)

    @property
    def moved_features(self) -> int:
        return 2 * self.q_size + 2 * (self.latent_dim + self.rope_dim) + self.attended_size

    def held_features(self, *, expands_latents: bool, has_nodes: bool, **_: object) -> int:
        """A node has a second output."""
        latents = self.latent_dim + self.rope_dim
        held = self.q_size + latents + self.attended_size
        if expands_latents:
            held += latents + self.num_heads * (self.nope_dim + self.v_head_dim) + self.attended_size * has_nodes
        return held

    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        """Canonical weights. `kv_b` has, for each head, the rows of k and then of v: two factors."""
        heads, q_head, kv_head = self.num_heads, self.nope_dim + self.rope_dim, self.nope_dim + self.v_head_dim
        table: WeightTable = {}
        if self.q_rank is not None:
            table[f"{prefix}.q_a"] = WeightSpec(shape=(self.q_rank, hidden_size))
            table[f"{prefix}.q_a_norm"] = WeightSpec(shape=(self.q_rank,))
        q_rows, q_columns = heads * q_head, hidden_size if self.q_rank is None else self.q_rank
        kv_rows = heads * kv_head
        return table | {
            f"{prefix}.q_b": row_sharded((q_rows, q_columns), (q_rows,), (q_head,)),
            f"{prefix}.kv_a": WeightSpec(shape=(self.latent_dim + self.rope_dim, hidden_size)),
            f"{prefix}.kv_a_norm": WeightSpec(shape=(self.latent_dim,)),
            f"{prefix}.kv_b": WeightSpec(
                shape=(kv_rows, self.latent_dim), sharding="rows", segments=(kv_rows,), units=(kv_head,), is_plain=True
            ),
            f"{prefix}.o": WeightSpec(shape=(hidden_size, self.attended_size), sharding="columns"),
        }
