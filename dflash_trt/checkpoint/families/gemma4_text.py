"""Gemma 4, the language model alone: full layers have heads of their own sizes and make V of K, norms are plain w."""

from types import MappingProxyType
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, one
from dflash_trt.checkpoint.gemma_layers import (
    ACTIVATION,
    FULL,
    LEFT_OUT,
    SLIDING,
    norm_names,
    read_model,
    read_ropes,
    read_sliding,
    read_window,
)
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.decoder import TargetSpec

_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

# Of transformers' Gemma4TextConfig.
DEFAULTS: Final = MappingProxyType(
    {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
    }
)


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    reader.require("use_bidirectional_attention", "vision", hint="Attention that sees ahead is not implemented.")
    is_sliding = _read_sliding(reader, sizes.num_layers)
    sources = _read_sources(reader, is_sliding)
    mixers = _read_mixers(reader, sizes)
    is_wide = reader.flag("use_double_wide_mlp", default=False)
    dense = sizes.dense_fields() | {"activation": "gelu_tanh"}
    wide = dense | {"intermediate_size": 2 * sizes.intermediate_size}
    reader.require("enable_moe_block", False, hint=NOT_IMPLEMENTED)
    reader.require("hidden_size_per_layer_input", 0, hint=NOT_IMPLEMENTED)
    reader.ignore(("num_experts", "top_k_experts", "moe_intermediate_size", "vocab_size_per_layer_input"))
    return [
        {
            "mixer": {**mixers[SLIDING if slides else FULL], "mask": mask, "shares_kv_with": source},
            "feed_forward": wide if is_wide and source is not None else dense,
            "has_post_norms": True,
            "has_output_scale": True,
        }
        for slides, mask, source in zip(is_sliding, read_window(reader, is_sliding), sources, strict=True)
    ]


def _read_sliding(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """The last layer is full, whatever the file says (transformers)."""
    is_sliding = read_sliding(reader, num_layers)
    if is_sliding and is_sliding[-1]:
        reader.note("layer_types", "the last layer has full attention, as in transformers")
    return (*is_sliding[:-1], False)


def _read_sources(reader: ConfigReader, is_sliding: tuple[bool, ...]) -> list[int | None]:
    """Of the last layers, which have no K and V of their own: the last layer of the same kind that has."""
    num_shared = reader.optional_integer("num_kv_shared_layers", minimum=0) or 0
    num_own = len(is_sliding) - num_shared
    if num_shared and not set(is_sliding) <= set(is_sliding[: max(num_own, 0)]):
        expected = "layers with K and V of their own of each kind"
        reader.refuse("num_kv_shared_layers", expected=expected, hint="Use a checkpoint that belongs to its file.")
        num_own = len(is_sliding)
    last = {slides: i for i, slides in enumerate(is_sliding[:num_own])}
    return [None if i < num_own else last[slides] for i, slides in enumerate(is_sliding)]


def _read_mixers(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, dict[str, Any]]:
    """Fields of a Gqa by kind of layer, without its mask. Only layers that make V of K have other numbers of heads."""
    ropes = read_ropes(reader, _ROPES)
    common = sizes.mixer_fields(reader) | {"has_qk_norm": True, "has_v_norm": True, "scale": 1.0}
    full = common | {"rope": ropes[FULL], "head_dim": reader.optional_integer("global_head_dim") or sizes.head_dim}
    num_global = reader.optional_integer("num_global_key_value_heads")
    if reader.flag("attention_k_eq_v", default=False):
        full |= {"num_kv_heads": num_global or sizes.num_kv_heads, "has_v_proj": False}
    return {SLIDING: common | {"rope": ropes[SLIDING]}, FULL: full}


def own_names(model: str, spec: TargetSpec) -> ForeignTable:
    scales = {f"target.layers.{i}.output_scale": one(f"{model}layers.{i}.layer_scalar") for i in range(spec.num_layers)}
    return norm_names(model, spec) | scales


FAMILY = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    read_layers=read_layers,
    activation=ACTIVATION,
    read_model=read_model,
    own_names=own_names,
    defaults=DEFAULTS,
    left_out=LEFT_OUT,
)
