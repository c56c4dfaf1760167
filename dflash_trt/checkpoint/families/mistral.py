"""Mistral: Llama's arithmetic, with one window in every layer or none. Mistral 3: language model only."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_rope, require_dense
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.producers.base import require_known_producer

_ROPE_THETA = 10000.0  # transformers' default
_WINDOW = 4096  # transformers' default; null is no window


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    reader.require("attention_bias", False, hint=NOT_IMPLEMENTED)
    mixer = sizes.mixer_fields(reader) | {"rope": read_rope(reader, default_theta=_ROPE_THETA)}
    window = reader.optional_integer("sliding_window") if reader.is_given("sliding_window") else _WINDOW
    return layers_of(mixer, sizes.dense_fields(), [{"window": window}] * sizes.num_layers)


FAMILY = Family(
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    read_layers=read_layers,
    left_out=("vision_tower.", "multi_modal_projector."),
)
