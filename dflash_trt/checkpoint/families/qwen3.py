"""Qwen3: norms of q and k, and windows if the checkpoint has them."""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import (
    DecoderSizes,
    layers_of,
    read_layer_types,
    read_rope,
    require_dense,
    window_masks,
)
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.producers.base import require_known_producer


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    mixer = sizes.mixer_fields(reader) | {"rope": read_rope(reader), "has_qk_norm": True}
    return layers_of(mixer, sizes.dense_fields(), read_masks(reader, sizes))


def read_masks(reader: ConfigReader, sizes: DecoderSizes) -> list[dict[str, Any]]:
    """Per-layer windows by `layer_types`, else from max_window_layers on if use_sliding_window is true."""
    window = reader.optional_integer("sliding_window")
    layer_types = read_layer_types(reader, sizes.num_layers)
    max_window_layers = reader.optional_integer("max_window_layers", minimum=0)
    uses_window = reader.flag("use_sliding_window", default=False)
    if layer_types is None and uses_window:
        if max_window_layers is None:
            reader.refuse("max_window_layers", expected="an integer, since use_sliding_window is true", hint="Add it.")
        layer_types = tuple(i >= (max_window_layers or 0) for i in range(sizes.num_layers))
    if layer_types is None or not any(layer_types):
        return sizes.full_masks()
    masks = window_masks(reader, layer_types, window)
    if not uses_window:  # Hugging Face drops the window then
        hint = "Set it to true if the checkpoint was trained with the window, else make every layer full_attention."
        reader.refuse("use_sliding_window", expected="true, since some layers are sliding", hint=hint)
    return masks


FAMILY = Family(architectures=("Qwen3ForCausalLM",), read_layers=read_layers)
