"""GLM-4.5, 4.6 and 4.7: half of a head rotated, DeepSeek-V3's router, and an expert of all tokens."""

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_rope, read_rotary_dim
from dflash_trt.checkpoint.families.base import MTP_LAYER, Family, LayerFields
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.checkpoint.sigmoid_router import expert_names, read_feed_forwards

_ROPE_THETA = 10000.0  # transformers' default
_PARTIAL_ROTARY_FACTOR = 0.5  # transformers' default


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    reader.require("sliding_window", hint=NOT_IMPLEMENTED)
    rotary_dim = read_rotary_dim(reader, sizes.head_dim, default=_PARTIAL_ROTARY_FACTOR)
    mixer = sizes.mixer_fields(reader) | {
        "rope": read_rope(reader, default_theta=_ROPE_THETA, is_partial=True),
        "rotary_dim": rotary_dim,
        "has_qk_norm": reader.flag("use_qk_norm", default=False),
        "has_o_bias": False,  # with attention_bias, too
    }
    layers = layers_of(mixer, {}, sizes.full_masks())
    forwards = read_feed_forwards(reader, sizes, num_dense=1, scale=1.0, num_groups=1, num_chosen_groups=1)
    return [layer | {"feed_forward": forward} for layer, forward in zip(layers, forwards, strict=True)]


FAMILY = Family(
    architectures=("Glm4MoeForCausalLM",),
    read_layers=read_layers,
    expert_names=expert_names,
    has_drafting_layers=True,
    mtp=MTP_LAYER,
)
