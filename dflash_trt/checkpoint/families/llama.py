"""Llama 3.x: no norms of q and k, no windows, an MLP that may have biases."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes, layers_of, read_rope, require_dense
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.producers.base import require_known_producer

_ROPE_THETA = 10000.0  # Hugging Face's default; files older than rope_theta rely on it


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    mixer = sizes.mixer_fields(reader) | {"rope": read_rope(reader, default_theta=_ROPE_THETA)}
    reader.require("sliding_window", hint="Llama has no sliding window: remove the key.")
    return layers_of(mixer, sizes.dense_fields(has_bias=reader.flag("mlp_bias", default=False)), sizes.full_masks())


FAMILY = Family(architectures=("LlamaForCausalLM",), read_layers=read_layers)
