"""Qwen2 and Qwen2.5: biases of q, k and v, and windows if the checkpoint has them."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_rope, require_dense
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.families.qwen3 import read_masks
from dflash_trt.checkpoint.producers.base import require_known_producer

_ROPE_THETA = 10000.0  # transformers' default


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    reader.require("attention_bias", True, hint="Qwen2 has biases of q, k and v: remove the key.")
    reader.require("use_mrope", False, hint=NOT_IMPLEMENTED)
    rope = read_rope(reader, default_theta=_ROPE_THETA)
    mixer = sizes.mixer_fields(reader) | {"rope": rope, "has_qkv_bias": True, "has_o_bias": False}
    return layers_of(mixer, sizes.dense_fields(), read_masks(reader, sizes))


FAMILY = Family(architectures=("Qwen2ForCausalLM",), read_layers=read_layers)
