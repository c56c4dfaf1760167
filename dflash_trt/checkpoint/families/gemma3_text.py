"""Gemma 3, language model only: four 1 + w norms a layer, windows in five of six layers, two RoPEs."""

from types import MappingProxyType
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, require_dense
from dflash_trt.checkpoint.families.base import Family, LayerFields
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

_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4

# Defaults of transformers' Gemma3TextConfig: published files of multimodal models only have differences.
_DEFAULTS: Final = MappingProxyType(
    {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    reader.require("use_bidirectional_attention", False, hint=NOT_IMPLEMENTED)
    is_sliding = read_sliding(reader, sizes.num_layers)
    ropes = read_ropes(reader, _default_ropes(reader))
    mixer = sizes.mixer_fields(reader) | {"has_qk_norm": True, "scale": reader.number("query_pre_attn_scalar") ** -0.5}
    dense = sizes.dense_fields() | {"activation": "gelu_tanh"}
    return [
        {
            "mixer": {**mixer, "rope": ropes[SLIDING if slides else FULL], "mask": mask},
            "feed_forward": dense,
            "has_post_norms": True,
        }
        for slides, mask in zip(is_sliding, read_window(reader, is_sliding), strict=True)
    ]


def _default_ropes(reader: ConfigReader) -> dict[str, dict[str, Any]]:
    """As older files say it: a theta for each kind of layer, and a scaling for full ones."""
    scaling = reader.value("rope_scaling")
    if scaling is not None and (not isinstance(scaling, dict) or reader.has("rope_parameters")):
        reader.refuse(
            "rope_scaling", expected="an object, and none besides rope_parameters", hint="Remove one of them."
        )
        scaling = None
    full = reader.optional_number("rope_theta") or _GLOBAL_THETA
    local = reader.optional_number("rope_local_base_freq") or _LOCAL_THETA
    return {SLIDING: {"rope_theta": local}, FULL: {**(scaling or {}), "rope_theta": full}}


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    read_layers=read_layers,
    activation=ACTIVATION,
    read_model=read_model,
    own_names=norm_names,
    defaults=_DEFAULTS,
    has_offset_norms=True,
    left_out=LEFT_OUT,
)
