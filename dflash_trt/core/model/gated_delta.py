"""A gated delta net: linear attention with a recurrent state, after a short causal convolution.

Source: arXiv 2412.06464 and `Qwen3NextGatedDeltaNet` of transformers. Per token, with a decay g <= 0 and a rate beta:

    S = exp(g) S;  delta = beta (v - S^T k);  S = S + k delta^T;  o = S^T q
"""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import Size
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.mixer import Mixer, MixerFlops
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import Recurrent
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, row_sharded


class GatedDelta(Mixer):
    """One layer.

    Key head j serves the value heads j * r .. j * r + r - 1, where r is `num_value_heads / num_key_heads`.
    """

    is_paged: ClassVar[bool] = False
    mask: ClassVar[AttentionMask] = AttentionMask()

    kind: Literal["gated_delta"] = "gated_delta"
    num_key_heads: Size
    num_value_heads: Size
    key_head_dim: Size
    value_head_dim: Size
    conv_size: Size  # tokens that a filter of the convolution sees

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"num_value_heads in multiples of num_key_heads {self.num_key_heads}")
        return self

    @property
    def k_size(self) -> int:
        """Features of all keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def v_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.k_size + self.v_size

    @property
    def sharded_sizes(self) -> dict[str, int]:
        return {"num_key_heads": self.num_key_heads}

    def shard(self, mapping: Mapping) -> "GatedDelta":
        """One rank's shard: its key heads, and the value heads that they serve."""
        sizes = {name: getattr(self, name) // mapping.tp_size for name in ("num_key_heads", "num_value_heads")}
        return self.model_copy(update=sizes)

    def state(
        self, name: str, dtype: FloatDType, scales: LayerKvScales | None = None, *, num_records: int = 1, **_: object
    ) -> Recurrent:
        return Recurrent(
            name=name,
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            conv_size=self.conv_size,
            num_records=num_records,
            dtype=dtype,
        )

    @property
    def flops(self) -> tuple[MixerFlops, ...]:
        """S^T k, k delta^T and S^T q, and the convolution."""
        products = 6 * self.num_value_heads * self.key_head_dim * self.value_head_dim
        return (MixerFlops(per_token=products + 2 * self.num_channels * self.conv_size),)

    @property
    def moved_features(self) -> int:
        return 2 * (self.num_channels + self.v_size)

    def held_features(self, *, float32_size: int, **_: object) -> int:
        return 2 * self.num_channels + (2 + float32_size) * self.v_size

    def weights(self, prefix: str, hidden_size: int) -> WeightTable:
        """Canonical weights; `qkvz`: q, k, v and the output's gate z, `ba`: what beta and decay come from."""
        qkv, heads = (self.k_size, self.k_size, self.v_size), self.num_value_heads
        return {
            f"{prefix}.qkvz": row_sharded((sum(qkv) + self.v_size, hidden_size), (*qkv, self.v_size)),
            f"{prefix}.ba": row_sharded((2 * heads, hidden_size), (heads, heads)),
            f"{prefix}.conv": row_sharded((self.num_channels, self.conv_size), qkv),
            f"{prefix}.log_rate": WeightSpec(shape=(heads,), sharding="rows", segments=(heads,), is_float32=True),
            f"{prefix}.dt_bias": WeightSpec(shape=(heads,), sharding="rows", segments=(heads,), is_float32=True),
            f"{prefix}.gated_norm": WeightSpec(shape=(self.value_head_dim,)),
            f"{prefix}.o": WeightSpec(shape=(hidden_size, self.v_size), sharding="columns"),
        }
