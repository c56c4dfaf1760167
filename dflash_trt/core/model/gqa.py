"""Grouped-query attention over paged K/V: its parameters, weights and state."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import Frozen, Scale, Size
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.mixer import Mixer, MixerFlops
from dflash_trt.core.model.rope import RopeSpec, Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import PagedKv, SharedKv
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, row_sharded


class AttentionMask(Frozen):
    """Keys that a query sees.

    `window` counts the token itself: a key is visible when query_position - key_position < window; a layer that is not
    causal also asks key_position - query_position < window (Hugging Face's convention).

    With `chunk`, positions are split into chunks of that size, counted from 0, and a key is visible only to queries of
    its own chunk (Llama 4).

    `is_window_anchored`, in a drafter: every slot of a block sees the last `window` tokens before the anchor and the
    whole block (Speculators' convention). Positions before `first_key` are hidden from a drafter's slots: the first
    token of a chain's context has no row.
    """

    window: Size | None = None
    chunk: Size | None = None
    is_causal: bool = True
    is_window_anchored: bool = False
    first_key: Annotated[int, Field(ge=0, le=1)] = 0

    @property
    def span(self) -> int | None:
        """The window that holds every key a query sees: a chunk ends at the query, at the latest."""
        spans = [size for size in (self.window, self.chunk) if size is not None]
        return min(spans, default=None)


class QueryTemperature(Frozen):
    """A query at position p is multiplied by 1 + scale * ln(1 + floor((p + 1) / interval)) (Llama 4)."""

    interval: Size
    scale: Scale


class Gqa(Mixer):
    """Grouped-query attention of one layer.

    RoPE rotates the first `rotary_dim` dimensions of a head; None means all. With `has_output_gate`, a query head comes
    with a gate of its size, whose sigmoid multiplies the head's output (Qwen3-Next).

    `temperature` then scales the queries. `scale` multiplies the scores; None means head_dim ** -0.5. `softcap` c then
    turns a score s into c * tanh(s / c) (Gemma 2). `has_qk_norm`: an RMSNorm over each head of q and k, before RoPE;
    `has_joint_qk_norm`: over all heads of q and all of k (MiniMax-M2). `has_sinks`: the softmax of a head has one more
    logit, without a value (gpt-oss). `has_v_norm`: an RMSNorm without a weight over each head of v. Without
    `has_v_proj`, v is k before its norm and rotation (Gemma 4).

    A layer that `shares_kv_with` an earlier one attends over the pages of that layer, and has no K and V of its own.
    """

    kind: Literal["gqa"] = "gqa"
    num_heads: Size
    num_kv_heads: Size
    head_dim: Annotated[Size, Field(multiple_of=2)]  # RoPE rotates pairs
    rope: RopeSpec
    rotary_dim: Annotated[Size, Field(multiple_of=2)] | None = None
    mask: AttentionMask = AttentionMask()
    scale: Scale | None = None
    softcap: Scale | None = None
    temperature: QueryTemperature | None = None
    has_qk_norm: bool = False
    has_joint_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_sinks: bool = False
    has_output_gate: bool = False
    has_v_norm: bool = False
    has_v_proj: bool = True
    shares_kv_with: Annotated[int, Field(ge=0)] | None = None

    @field_validator("rotary_dim")
    @classmethod
    def _within_head(cls, rotary_dim: int | None, info: ValidationInfo) -> int | None:
        head_dim: int = info.data.get("head_dim") or rotary_dim or 0
        if rotary_dim is not None and rotary_dim > head_dim:
            raise ValueError(f"at most head_dim {head_dim}")
        return rotary_dim

    @field_validator("num_kv_heads")
    @classmethod
    def _divide_heads(cls, num_kv_heads: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"a divisor of num_heads {num_heads}")
        return num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the projection of q: per head, q and then its gate, if it has one."""
        return 2 * self.q_size if self.has_output_gate else self.q_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def projections(self) -> Literal["qkv", "qk", "q"]:
        """The projections of the layer, with its own K and V if any, as one matrix."""
        return "q" if self.shares_kv_with is not None else "qkv" if self.has_v_proj else "qk"

    @property
    def attends_as(self) -> "Gqa":
        return self

    @property
    def rotary(self) -> Rotary:
        return Rotary(self.rope, self.head_dim if self.rotary_dim is None else self.rotary_dim)

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def head_norms(self) -> tuple[str, ...]:
        """Norms with a weight, of q and of the layer's own k."""
        return ("q_norm", "k_norm")[: len(self.projections)] if self.has_qk_norm or self.has_joint_qk_norm else ()

    @property
    def sharded_sizes(self) -> dict[str, int]:
        return {"num_heads": self.num_heads}  # whole heads, not their rows

    @property
    def replicated_sizes(self) -> dict[str, int]:
        return {"num_kv_heads": self.num_kv_heads}

    def shard(self, mapping: Mapping) -> "Gqa":
        """One rank's shard: its heads, and the K/V heads that these read."""
        num_kv_heads = mapping.num_kv_heads_of(self.num_kv_heads)
        return self.model_copy(update={"num_heads": self.num_heads // mapping.tp_size, "num_kv_heads": num_kv_heads})

    def state_owner(self, index: int) -> int:
        return index if self.shares_kv_with is None else self.shares_kv_with

    def state(
        self,
        name: str,
        dtype: FloatDType,
        scales: LayerKvScales | None = None,
        *,
        window: int | None = None,
        owner: str | None = None,
        **_: object,
    ) -> PagedKv | SharedKv:
        """Pages of the layer or of its owner, which keep `window`: FP8 with scales, `dtype` without."""
        pages = PagedKv(
            name=name if owner is None else owner,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype if scales is None else "float8_e4m3fn",
            scales=scales,
            window=window,
        )
        return pages if owner is None else SharedKv(name=name, source=pages)

    @property
    def flops(self) -> tuple[MixerFlops, ...]:
        return (MixerFlops(per_key=4 * self.q_size),)

    @property
    def moved_features(self) -> int:
        return 2 * self.q_rows + 2 * self.kv_size

    def held_features(self, **_: object) -> int:
        return self.moved_features

    def weights(self, prefix: str, hidden_size: int, *, owns_kv: bool = True) -> WeightTable:
        """Canonical weights. Without `owns_kv` only q: K and V of all layers are one matrix elsewhere."""
        name = self.projections if owns_kv else "q"
        sizes = (self.q_rows, self.kv_size, self.kv_size)[: len(name)]
        units = (1, self.head_dim, self.head_dim)[: len(name)]
        table = {f"{prefix}.{name}": row_sharded((sum(sizes), hidden_size), sizes, units)}
        if self.has_qkv_bias:
            table[f"{prefix}.{name}_bias"] = row_sharded((sum(sizes),), sizes, units)
        if self.has_sinks:
            table[f"{prefix}.sinks"] = row_sharded((self.num_heads,), (self.num_heads,))
        table[f"{prefix}.o"] = WeightSpec(shape=(hidden_size, self.q_size), sharding="columns")
        if self.has_o_bias:
            table[f"{prefix}.o_bias"] = WeightSpec(shape=(hidden_size,))
        if self.has_qk_norm:
            table |= {f"{prefix}.{norm}": WeightSpec(shape=(self.head_dim,)) for norm in self.head_norms}
        elif self.has_joint_qk_norm:
            table[f"{prefix}.q_norm"] = row_sharded((self.q_size,))
            table[f"{prefix}.k_norm"] = row_sharded((self.kv_size,), (self.kv_size,), (self.head_dim,))
        return table
