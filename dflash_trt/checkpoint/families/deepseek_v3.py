"""DeepSeek-V3 and R1: multi-head latent attention, and a router of groups with sigmoids."""

import math
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, read_rope
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.checkpoint.sigmoid_router import expert_names, read_feed_forwards

# transformers' defaults, of DeepseekV3Config.
_ROPE_THETA = 10000.0
_NUM_DENSE, _ROUTING_SCALE, _NUM_GROUPS, _NUM_CHOSEN_GROUPS = 3, 2.5, 8, 4


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    for name in ("attention_bias", "mlp_bias"):
        reader.require(name, False, hint=NOT_IMPLEMENTED)
    reader.require("sliding_window", hint=NOT_IMPLEMENTED)
    mixer = _read_mixer(reader, sizes)
    forwards = read_feed_forwards(
        reader,
        sizes,
        num_dense=_NUM_DENSE,
        scale=_ROUTING_SCALE,
        num_groups=_NUM_GROUPS,
        num_chosen_groups=_NUM_CHOSEN_GROUPS,
    )
    return [{"mixer": mixer, "feed_forward": forward} for forward in forwards]


def _read_mixer(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """Fields of an Mla. The norms of the latents have transformers' 1e-6, whatever `rms_norm_eps` is."""
    nope_dim, rope_dim = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    parts = "qk_nope_head_dim and qk_rope_head_dim together"
    reader.require("qk_head_dim", nope_dim + rope_dim, hint=f"It is {parts}: one of the three is wrong.")
    rope = read_rope(reader, default_theta=_ROPE_THETA)
    return {
        "kind": "mla",
        "num_heads": sizes.num_heads,
        "q_rank": reader.optional_integer("q_lora_rank"),
        "latent_dim": reader.integer("kv_lora_rank"),
        "nope_dim": nope_dim,
        "rope_dim": rope_dim,
        "v_head_dim": reader.integer("v_head_dim"),
        "rope": rope,
        "scale": (nope_dim + rope_dim) ** -0.5 * _magnitude(rope) ** 2,
        "has_paired_rope": reader.flag("rope_interleave", default=True),
    }


def _magnitude(rope: dict[str, Any]) -> float:
    """With `mscale_all_dim` YaRN also scales the scores."""
    mscale = rope.get("mscale_all_dim")
    return 1.0 if mscale is None else 0.1 * float(mscale) * math.log(rope["factor"]) + 1.0


FAMILY = Family(
    architectures=("DeepseekV3ForCausalLM",),
    read_layers=read_layers,
    expert_names=expert_names,
    has_drafting_layers=True,
)
