"""Shared by the Qwen families with gated delta nets: keys of their layers, and names of their tensors."""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    DecoderSizes,
    read_layer_kinds,
    read_rope,
    read_rotary_dim,
)
from dflash_trt.checkpoint.foreign_names import ForeignTable, mlp_names, one, stacked_rows
from dflash_trt.checkpoint.moe_config import softmax_moe
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.gated_delta import GatedDelta

_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
LEFT_OUT = ("model.visual.", "mtp.")  # the tower of images, and the module that drafts one token

_LINEAR, _FULL = "linear_attention", "full_attention"
_PARTIAL_ROTARY_FACTOR = 0.25  # transformers' default


def read_hybrid_mixers(reader: ConfigReader, sizes: DecoderSizes) -> list[dict[str, Any]]:
    """Fields of the mixer of each layer."""
    require_known_producer(reader)
    rotary_dim = read_rotary_dim(reader, sizes.head_dim, default=_PARTIAL_ROTARY_FACTOR)
    attention = sizes.mixer_fields(reader) | {
        "rope": read_rope(reader, is_partial=True),
        "rotary_dim": rotary_dim,
        "has_qk_norm": True,
        "has_output_gate": True,
    }
    delta = {"kind": "gated_delta"} | {name: reader.integer(key) for name, key in _SIZES.items()}
    reader.require("attn_output_gate", True, hint=NOT_IMPLEMENTED)
    reader.require("output_gate_type", "swish", "silu", hint=NOT_IMPLEMENTED)
    reader.require("mamba_ssm_dtype", "float32", hint="States are kept in float32.")
    return [delta if kind == _LINEAR else attention for kind in _layer_types(reader, sizes.num_layers)]


def read_shared_moe(reader: ConfigReader, *, normalizes: bool) -> dict[str, Any]:
    """Fields of a Moe whose tokens all go through one more expert, multiplied by a gate."""
    return softmax_moe(reader, normalizes=normalizes) | {
        "shared_size": reader.integer("shared_expert_intermediate_size"),
        "has_shared_gate": True,
    }


def common_delta_names(canonical: str, foreign: str, mixer: GatedDelta) -> ForeignTable:
    """Names except the projections'."""
    net = f"{foreign}.linear_attn"
    sizes = (mixer.k_size, mixer.k_size, mixer.v_size)
    shape = (mixer.num_channels, 1, mixer.conv_size)
    return {
        f"{canonical}.conv": stacked_rows(f"{net}.conv1d.weight", sizes, shape),
        f"{canonical}.log_rate": one(f"{net}.A_log"),
        f"{canonical}.dt_bias": one(f"{net}.dt_bias"),
        f"{canonical}.gated_norm": one(f"{net}.norm.weight"),
        f"{canonical}.o": one(f"{net}.out_proj.weight"),
    }


def shared_names(canonical: str, foreign: str) -> ForeignTable:
    """Names of the expert of all tokens."""
    gate = {f"{canonical}.shared_gate": one(f"{foreign}.mlp.shared_expert_gate.weight")}
    return mlp_names(f"{canonical}.shared", f"{foreign}.mlp.shared_expert") | gate


def _layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """`layer_types`, or full attention in every `full_attention_interval`-th layer."""
    interval = reader.optional_integer("full_attention_interval") or 4
    by_interval = tuple(_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers))
    return read_layer_kinds(reader, num_layers, (_LINEAR, _FULL)) or by_interval
