"""The keys that config.json files of targets and drafters share: sizes, layer types, RoPE."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.checkpoint.config_reader import ConfigReader

NOT_IMPLEMENTED = "This feature is not implemented: use a checkpoint without it."

# Positions in time, height and width are one and the same for text.
MROPE_KEYS = ("mrope_section", "mrope_interleaved")

_MAX_LAYERS = 1000  # far above any model; a corrupt count must not cause huge allocations

_ROPE_TYPES: dict[str, Literal["none", "linear", "llama3", "yarn"]] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of the whole model, before sharding."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int

    def spec_fields(self) -> dict[str, Any]:
        """The fields of a DecoderSpec that are sizes."""
        return {name: getattr(self, name) for name in ("hidden_size", "rms_norm_eps", "max_position_embeddings")}

    def mixer_fields(self, reader: ConfigReader, *, has_biases: bool = False) -> dict[str, Any]:
        """Fields of a Gqa, with `attention_bias`; `has_biases` is its default."""
        has_bias = reader.flag("attention_bias", default=has_biases)
        sizes = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        return {"kind": "gqa"} | sizes | {"has_qkv_bias": has_bias, "has_o_bias": has_bias}

    def dense_fields(self, *, has_bias: bool = False) -> dict[str, Any]:
        """Fields of a Dense."""
        return {"kind": "dense", "intermediate_size": self.intermediate_size, "has_bias": has_bias}

    def full_masks(self) -> list[dict[str, Any]]:
        """Causal attention without windows in every layer."""
        return [{} for _ in range(self.num_layers)]


def layers_of(
    mixer: Mapping[str, Any], feed_forward: Mapping[str, Any], masks: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Fields of LayerSpecs that differ only in their masks."""
    return [{"mixer": {**mixer, "mask": mask}, "feed_forward": feed_forward} for mask in masks]


def read_sizes(reader: ConfigReader) -> DecoderSizes:
    """Read sizes; head_dim and num_key_value_heads have Hugging Face's defaults."""
    num_problems = len(reader.problems)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.optional_integer("num_key_value_heads")
    head_dim = reader.optional_integer("head_dim")
    sizes = DecoderSizes(
        hidden_size=hidden_size,
        intermediate_size=_read_intermediate_size(reader),
        num_layers=reader.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=hidden_size // num_heads if head_dim is None else head_dim,
        rms_norm_eps=reader.number("rms_norm_eps"),
        vocab_size=reader.integer("vocab_size"),
        max_position_embeddings=reader.integer("max_position_embeddings"),
    )
    if len(reader.problems) == num_problems:
        _check_sizes(reader, sizes)
    return sizes


def require_plain_decoder(reader: ConfigReader, *, activation: str = "silu") -> None:
    """Refuse features that no decoder here implements, and an activation that is not the family's."""
    for name in ("hidden_act", "hidden_activation"):
        reader.require(name, activation, hint=NOT_IMPLEMENTED)
    reader.require("pretraining_tp", 1, hint=NOT_IMPLEMENTED)
    for name in ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"):
        reader.require(name, False, hint=NOT_IMPLEMENTED)
    reader.require("cross_attention_hidden_size", hint=NOT_IMPLEMENTED)
    reader.require("pruned_heads", {}, hint=NOT_IMPLEMENTED)
    reader.require("rope_interleaved", False, hint=NOT_IMPLEMENTED)
    reader.require("attn_logit_softcapping", hint=NOT_IMPLEMENTED)
    for name in (
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
        "logit_scale",
    ):
        reader.require(name, 1, hint=NOT_IMPLEMENTED)


def require_dense(reader: ConfigReader) -> None:
    """Refuse experts, for families without them."""
    for name in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
        reader.require(name, hint="Experts are not implemented for this architecture: use a dense checkpoint.")


def read_rope(
    reader: ConfigReader,
    *,
    default_theta: float | None = None,
    default_scaling: Mapping[str, Any] | None = None,
    is_partial: bool = False,
    ignored: Iterable[str] = (),
) -> dict[str, Any]:
    """Fields of a RopeSpec, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    `default_theta` applies if neither schema has a theta; None makes the key required. `default_scaling` stands for an
    absent section. `is_partial`: `read_rotary_dim` reads the part that is rotated. `ignored` are keys of the section.
    """
    if not is_partial:
        reader.require("partial_rotary_factor", 1, hint=NOT_IMPLEMENTED)
    has_both = reader.has("rope_parameters") and reader.has("rope_scaling")
    if has_both and reader.value("rope_parameters") != reader.value("rope_scaling"):
        hint = "Remove the one that the checkpoint was not trained with."
        reader.refuse("rope_scaling", expected="no such key besides rope_parameters", hint=hint)
    name = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
    section = reader.optional_section(name) or reader.nested(name, default_scaling or {})
    section.ignore(ignored)
    theta = _read_theta(reader, section, default_theta)
    if is_partial:
        section.ignore(("partial_rotary_factor", *MROPE_KEYS))
    else:
        section.require("partial_rotary_factor", 1, hint=NOT_IMPLEMENTED)
    fields = read_scaling(section, theta, reader.value("max_position_embeddings"))
    section.finish()
    return fields


def rope_section(reader: ConfigReader) -> ConfigReader:
    """`rope_parameters` or `rope_scaling`, empty where there is neither."""
    name = "rope_parameters" if reader.has("rope_parameters") else "rope_scaling"
    return reader.nested(name, reader.value(name) if isinstance(reader.value(name), dict) else {})


def read_rotary_dim(reader: ConfigReader, head_dim: int, *, default: float) -> int:
    """Dimensions of a head that RoPE rotates: `partial_rotary_factor`, inside of the section or outside."""
    section = rope_section(reader)
    factors = (section.optional_number("partial_rotary_factor"), reader.optional_number("partial_rotary_factor"))
    factor = next((factor for factor in factors if factor is not None), default)
    rotary_dim = int(head_dim * factor)
    if rotary_dim > head_dim or rotary_dim % 2 or not rotary_dim:
        expected = f"a part of head_dim {head_dim} that is even"
        reader.refuse("partial_rotary_factor", expected=expected, hint="RoPE rotates pairs.")
    return rotary_dim


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[bool, ...] | None:
    """For each layer, True if it is sliding; None without `layer_types`."""
    names = read_layer_kinds(reader, num_layers, ("full_attention", "sliding_attention"))
    return None if names is None else tuple(name == "sliding_attention" for name in names)


def read_layer_kinds(reader: ConfigReader, num_layers: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """`layer_types`, one of the `known` for each layer; None without."""
    names = reader.optional_texts("layer_types")
    if names is None:
        return None
    if set(names) - set(known):
        reader.refuse("layer_types", expected=f"only {' and '.join(known)}", hint=NOT_IMPLEMENTED)
    elif len(names) != num_layers:
        expected = f"num_hidden_layers = {num_layers} entries"
        reader.refuse("layer_types", expected=expected, hint=f"The list has {len(names)}: one of the two is wrong.")
    return names


def window_masks(reader: ConfigReader, is_sliding: Sequence[bool], window: int | None) -> list[dict[str, Any]]:
    """The mask of each layer, with `window` in the sliding ones."""
    if any(is_sliding):
        require_sliding_window(reader, window)
    return [{"window": window if slides else None} for slides in is_sliding]


def require_sliding_window(reader: ConfigReader, window: int | None) -> None:
    if window is None:
        reader.refuse("sliding_window", expected="an integer, since some layers are sliding", hint="Add it.")


def _check_sizes(reader: ConfigReader, sizes: DecoderSizes) -> None:
    if sizes.num_heads % sizes.num_kv_heads:
        expected = f"a divisor of num_attention_heads {sizes.num_heads}"
        reader.refuse("num_key_value_heads", expected=expected)
    if sizes.head_dim % 2 or sizes.head_dim == 0:
        found = f"even, found {sizes.head_dim} from hidden_size / num_attention_heads"
        expected = "an even number" if reader.has("head_dim") else found
        reader.refuse("head_dim", expected=expected, hint="RoPE rotates pairs.")


def _read_intermediate_size(reader: ConfigReader) -> int:
    """0 where every layer has experts and the key is absent; a dense layer refuses it."""
    if reader.has("moe_intermediate_size"):
        return reader.optional_integer("intermediate_size") or 0
    return reader.integer("intermediate_size")


def _read_theta(reader: ConfigReader, section: ConfigReader, default_theta: float | None) -> float:
    inner, outer = section.optional_number("rope_theta"), reader.optional_number("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        expected = f"{inner}, as inside {section.subject('rope_theta')}"
        reader.refuse("rope_theta", expected=expected, hint="Keep the one that the checkpoint was trained with.")
    for theta in (inner, outer, default_theta):
        if theta is not None:
            return theta
    return reader.number("rope_theta")


def read_scaling(section: ConfigReader, theta: float, max_positions: Any) -> dict[str, Any]:
    """Fields of a RopeSpec from the section that has the keys of its scaling."""
    rope_type = section.optional_text("rope_type") or section.optional_text("type") or "default"
    section.require("type", rope_type, hint="Remove it: it is the old name of rope_type.")
    if rope_type not in _ROPE_TYPES:
        name = "rope_type" if section.has("rope_type") else "type"
        section.refuse(name, expected=f"one of {', '.join(_ROPE_TYPES)}", hint=NOT_IMPLEMENTED)
        section.ignore(
            ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor")
        )
        return {"theta": theta}
    fields: dict[str, Any] = {"theta": theta, "scaling": _ROPE_TYPES[rope_type]}
    if rope_type != "default":
        fields["factor"] = section.number("factor")
    if rope_type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = _read_original_positions(section, max_positions)
    if rope_type == "llama3":
        fields["low_freq_factor"] = section.number("low_freq_factor")
        fields["high_freq_factor"] = section.number("high_freq_factor")
    if rope_type == "yarn":
        fields |= _yarn_fields(section)
    return fields


def _read_original_positions(section: ConfigReader, max_positions: Any) -> int:
    """transformers takes max_position_embeddings for an absent key."""
    name = "original_max_position_embeddings"
    if not section.has(name) and isinstance(max_positions, int):
        section.note(name, f"max_position_embeddings, {max_positions}, as in transformers")
        return max_positions
    return section.integer(name)


def _yarn_fields(section: ConfigReader) -> dict[str, Any]:
    names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    fields: dict[str, Any] = {name: section.optional_number(name) for name in names}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields["truncates_correction_range"] = section.flag("truncate", default=True)
    return fields
