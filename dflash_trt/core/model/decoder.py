"""A stack of layers, and the target that is one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, ValidationInfo, field_validator

from dflash_trt.core.dtype import FloatDType
from dflash_trt.core.frozen import MAX_INT32, Frozen, Index, Scale, Size
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.gqa import Gqa
from dflash_trt.core.model.mixer import Mixer
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.model.rope import Rotary
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.core.state_spec import LayerState
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, embedding_table, row_sharded

MAX_LAYERS = 1000

_M = TypeVar("_M", bound=Mixer)

LayerId = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


class LayerSpec(Frozen):
    """Norm, mixer, residual, norm, feed-forward, residual.

    With `has_post_norms`, the outputs of mixer and feed-forward are normed, too, before they are added (Gemma). With
    `has_output_scale`, the layer's output is multiplied by a number (Gemma 4). With `per_layer_size`, that many
    features of the token's per-layer embedding, gated by the output, are projected, normed and added before that
    (PerLayerEmbedding).
    """

    mixer: Annotated[Gqa | Mla | GatedDelta, Field(discriminator="kind")]
    feed_forward: Annotated[Dense | Moe, Field(discriminator="kind")]
    has_post_norms: bool = False
    has_output_scale: bool = False
    per_layer_size: Size | None = None

    def weights(self, prefix: str, hidden_size: int, *, mixer: WeightTable | None = None) -> WeightTable:
        """`mixer`: weights of the mixer, if not all of them are the layer's own."""
        names = (
            "attention_norm",
            "mlp_norm",
            *(("attention_post_norm", "mlp_post_norm") if self.has_post_norms else ()),
        )
        norms = {f"{prefix}.{name}": WeightSpec(shape=(hidden_size,)) for name in names}
        if self.has_output_scale:
            norms[f"{prefix}.output_scale"] = WeightSpec(shape=(1,))
        if self.per_layer_size is not None:
            norms[f"{prefix}.per_layer_gate"] = WeightSpec(shape=(self.per_layer_size, hidden_size))
            norms[f"{prefix}.per_layer_projection"] = WeightSpec(shape=(hidden_size, self.per_layer_size))
            norms[f"{prefix}.per_layer_norm"] = WeightSpec(shape=(hidden_size,))
        mixer = self.mixer.weights(prefix, hidden_size) if mixer is None else mixer
        return norms | mixer | self.feed_forward.weights(prefix, hidden_size)

    @property
    def moe(self) -> Moe | None:
        """The feed-forward, if it is a mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, Moe) else None


class PerLayerEmbedding(Frozen):
    """A second embedding with `size` features for each layer (Gemma 4 E2B, E4B).

    Its rows, times size ** 0.5, are added to a projection of the scaled rows of the first one, times
    hidden_size ** -0.5 and normed for each layer; the sum is multiplied by 2 ** -0.5.
    """

    size: Size
    vocab_size: Size

    def weights(self, prefix: str, hidden_size: int, num_layers: int) -> WeightTable:
        width = num_layers * self.size
        return {
            f"{prefix}.embedding": embedding_table(self.vocab_size, width),
            f"{prefix}.projection": WeightSpec(shape=(width, hidden_size)),
            f"{prefix}.norm": WeightSpec(shape=(self.size,)),
        }


class DecoderSpec(Frozen):
    """Fields that a target and a drafter share. Sizes count the whole model, before sharding."""

    role: ClassVar[str]

    hidden_size: Size
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=0.1)]
    layers: Annotated[tuple[LayerSpec, ...], Field(max_length=MAX_LAYERS)]
    max_position_embeddings: Size

    @field_validator("layers")
    @classmethod
    def _not_empty(cls, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        """Runs after the layers' own checks; `min_length` would not count the layers that these refuse."""
        if not layers:
            raise ValueError("at least one layer")
        return layers

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Distinct rotary embeddings, in the order of the layers."""
        rotaries = (layer.mixer.rotary for layer in self.layers)
        return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))

    @property
    def attentions(self) -> tuple[Gqa, ...]:
        """How the layers that attend over K and V do so, in their order: all layers of a drafter."""
        return tuple(gqa for layer in self.layers if (gqa := layer.mixer.attends_as) is not None)

    @property
    def latents(self) -> tuple[Mla, ...]:
        """Mixers of the layers that attend over latents, in their order."""
        return self._mixers(Mla)

    @property
    def delta_nets(self) -> tuple[GatedDelta, ...]:
        """Mixers of the layers with a gated delta net, in their order."""
        return self._mixers(GatedDelta)

    def _mixers(self, kind: type[_M]) -> tuple[_M, ...]:
        return tuple(mixer for layer in self.layers if isinstance(mixer := layer.mixer, kind))

    @property
    def moes(self) -> tuple[Moe, ...]:
        """Feed-forwards of the layers with experts, in their order."""
        return tuple(moe for layer in self.layers if (moe := layer.moe) is not None)

    @property
    def is_recurrent(self) -> bool:
        """True if some layer's state is no K/V pages."""
        return not all(layer.mixer.is_paged for layer in self.layers)

    def states(
        self, *, dtype: FloatDType, kv_scales: tuple[LayerKvScales, ...] | None = None, num_records: int = 1
    ) -> tuple[LayerState, ...]:
        """State of each layer of the whole model.

        `kv_scales` are for FP8 pages, `num_records` for recurrent states.
        """
        scales = kv_scales or (None,) * self.num_layers

        def state(i: int) -> LayerState:
            mixer = self.layers[i].mixer
            owner, prefix = mixer.state_owner(i), f"{self.role}_{'kv' if mixer.is_paged else 'state'}"
            return mixer.state(
                f"{prefix}.{i}",
                dtype,
                scales[owner],
                window=self._kept_window(owner),
                num_records=num_records,
                owner=None if owner == i else f"{prefix}.{owner}",
            )

        assert len(scales) == self.num_layers
        return tuple(state(i) for i in range(self.num_layers))

    def _kept_window(self, owner: int) -> int | None:
        """The window that a layer's pages keep: the largest among its readers, None if one reads everything."""
        readers = [layer.mixer for i, layer in enumerate(self.layers) if layer.mixer.state_owner(i) == owner]
        return largest_window([mixer.mask.span for mixer in readers])


def largest_window(windows: Sequence[int | None]) -> int | None:
    """None, no window, is larger than any."""
    return None if None in windows else max(window or 0 for window in windows)


class TargetSpec(DecoderSpec):
    """The model being served. `family` names the file of `checkpoint/families` that read it.

    `has_offset_norms`: norms multiply by 1 + w (Qwen3-Next), and an engine has 1 + w, in float32. Rows of the embedding
    are multiplied by `embedding_scale`, rounded to their dtype (Gemma); a head tied to it is not. `logit_softcap` c
    turns a logit z into c * tanh(z / c).
    """

    role: ClassVar[str] = "target"

    family: str
    vocab_size: Size
    is_embedding_tied: bool
    has_offset_norms: bool = False
    embedding_scale: Scale = 1.0
    logit_softcap: Scale | None = None
    per_layer_embedding: PerLayerEmbedding | None = None
    eos_token_ids: tuple[Index, ...] = ()
    bos_token_id: Index | None = None

    @field_validator("eos_token_ids", "bos_token_id")
    @classmethod
    def _in_vocabulary(cls, ids: Any, info: ValidationInfo) -> Any:
        vocab_size = info.data.get("vocab_size", MAX_INT32)
        if any(token_id >= vocab_size for token_id in (ids if isinstance(ids, tuple) else (ids or 0,))):
            raise ValueError(f"ids below vocab_size {vocab_size}")
        return ids

    def weights(self) -> WeightTable:
        """Canonical names of the target: `target.*`."""
        table: WeightTable = {"target.embedding": embedding_table(self.vocab_size, self.hidden_size)}
        if self.per_layer_embedding is not None:
            table |= self.per_layer_embedding.weights("target.per_layer", self.hidden_size, self.num_layers)
        for i, layer in enumerate(self.layers):
            table |= layer.weights(f"target.layers.{i}", self.hidden_size)
        table["target.norm"] = WeightSpec(shape=(self.hidden_size,))
        if not self.is_embedding_tied:
            table["target.lm_head"] = row_sharded((self.vocab_size, self.hidden_size), divided_by="all")
        if self.has_offset_norms:
            table |= {name: replace(table[name], is_float32=True) for name in table if is_offset_norm(name)}
        return table


def is_offset_norm(name: str) -> bool:
    """True for the canonical norms of a decoder with offset norms that have the offset."""
    return name.endswith("norm") and not name.endswith(".gated_norm")
