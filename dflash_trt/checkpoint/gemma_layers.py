"""Shared by the Gemma families: keys of layers, two rotary embeddings, names of norms."""

from collections.abc import Mapping
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    DecoderSizes,
    read_layer_types,
    read_scaling,
    window_masks,
)
from dflash_trt.checkpoint.foreign_names import ForeignTable, one
from dflash_trt.core.model.decoder import TargetSpec

ACTIVATION: Final = "gelu_pytorch_tanh"
SLIDING, FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # every 6th layer is full

# Towers of images and sounds, in files of either age.
_TOWERS = (
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
)
LEFT_OUT: Final = tuple(f"{outer}{tower}" for outer in ("", "model.") for tower in _TOWERS)

_NORMS: Final = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def read_sliding(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """For each layer, True if it is sliding."""
    pattern = reader.optional_integer("sliding_window_pattern") or _PATTERN
    reader.ignore(("_sliding_window_pattern",))  # layer_types were made from it
    found = read_layer_types(reader, num_layers)
    return tuple((i + 1) % pattern != 0 for i in range(num_layers)) if found is None else found


def read_window(reader: ConfigReader, is_sliding: tuple[bool, ...]) -> list[dict[str, Any]]:
    """The mask of each layer."""
    return window_masks(reader, is_sliding, reader.optional_integer("sliding_window"))


def read_ropes(reader: ConfigReader, defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """RopeSpec fields by kind of layer: `rope_parameters`, with `defaults` for absent kinds and thetas."""
    section = reader.optional_section("rope_parameters") or reader.nested("rope_parameters", {})
    ropes = {}
    for kind in (SLIDING, FULL):
        given = section.optional_section(kind)
        inner = given or section.nested(kind, defaults[kind])
        theta = inner.optional_number("rope_theta") or defaults[kind]["rope_theta"]
        if inner.value("rope_type") == "proportional":
            ropes[kind] = {
                "theta": theta,
                "scaling": "proportional",
                "factor": inner.optional_number("factor") or 1.0,
                "rotated_fraction": inner.optional_number("partial_rotary_factor") or 1.0,
            }
        else:
            inner.require("partial_rotary_factor", 1, hint=NOT_IMPLEMENTED)
            ropes[kind] = read_scaling(inner, theta, reader.value("max_position_embeddings"))
        inner.finish()
    if any(section.has(kind) for kind in (SLIDING, FULL)):
        section.ignore(("rope_type", "rope_theta"))  # transformers adds them where all layers are of one kind
    section.finish()
    return ropes


def read_model(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """Fields of a TargetSpec."""
    softcap = reader.optional_number("final_logit_softcapping")
    return {"embedding_scale": sizes.hidden_size**0.5, "logit_softcap": softcap}


def norm_names(model: str, spec: TargetSpec) -> ForeignTable:
    """The four norms of each layer."""
    return {
        f"target.layers.{i}.{ours}": one(f"{model}layers.{i}.{theirs}.weight")
        for i in range(spec.num_layers)
        for ours, theirs in _NORMS.items()
    }
