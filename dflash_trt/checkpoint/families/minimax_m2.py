"""MiniMax-M2: RMSNorm over all heads of q and of k, partial RoPE, a sigmoid router, no shared expert."""

from collections.abc import Collection
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_rope, read_rotary_dim
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, joint_expert_names, one, single_expert_names
from dflash_trt.checkpoint.moe_config import TRAINING_KEYS, expert_counts
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.feed_forward import Moe

_ROPE_THETA = 5000000.0  # transformers' default
_ONLY_FULL_ATTENTION = 1  # in attn_type_list

# Keys of MiniMax-01's other layers, of training, and of modules that draft.
_UNUSED_KEYS = (
    *TRAINING_KEYS,
    "router_jitter_noise",
    "mlp_intermediate_size",
    "shared_moe_mode",
    "swa_rope_theta",
    "use_grouped_topk",
    "max_model_len",
)


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    _require_known_layers(reader)
    rotary_dim = _read_rotary_dim(reader, sizes.head_dim)
    mixer = sizes.mixer_fields(reader) | {
        "rope": read_rope(reader, default_theta=_ROPE_THETA, is_partial=True),
        "rotary_dim": rotary_dim,
        "has_joint_qk_norm": True,
    }
    return layers_of(mixer, _read_moe(reader, sizes.intermediate_size), sizes.full_masks())


def _require_known_layers(reader: ConfigReader) -> None:
    reader.ignore(_UNUSED_KEYS)
    reader.require("use_qk_norm", True, hint=NOT_IMPLEMENTED)
    reader.require("qk_norm_type", "per_layer", hint=NOT_IMPLEMENTED)
    for name in ("sliding_window", "attn_window_size", "num_expert_group", "topk_group"):
        reader.require(name, hint=NOT_IMPLEMENTED)
    for name in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        reader.require(name, 1, hint=NOT_IMPLEMENTED)
    if set(reader.optional_integers("attn_type_list") or ()) - {_ONLY_FULL_ATTENTION}:
        reader.refuse("attn_type_list", expected=f"only {_ONLY_FULL_ATTENTION}, full attention", hint=NOT_IMPLEMENTED)


def _read_rotary_dim(reader: ConfigReader, head_dim: int) -> int:
    """`rotary_dim`; transformers has `partial_rotary_factor` in its place."""
    rotary_dim = reader.optional_integer("rotary_dim")
    if rotary_dim is None:
        return read_rotary_dim(reader, head_dim, default=1.0)
    if rotary_dim > head_dim or rotary_dim % 2:
        reader.refuse("rotary_dim", expected=f"an even number up to head_dim {head_dim}", hint="RoPE rotates pairs.")
    elif read_rotary_dim(reader, head_dim, default=rotary_dim / head_dim) != rotary_dim:
        expected = f"{rotary_dim} of {head_dim} dimensions, as rotary_dim"
        reader.refuse("partial_rotary_factor", expected=expected, hint="Remove the one that is wrong.")
    return rotary_dim


def _read_moe(reader: ConfigReader, intermediate_size: int) -> dict[str, Any]:
    """`intermediate_size` is the size of one expert."""
    reader.require("scoring_func", "sigmoid", hint=NOT_IMPLEMENTED)
    reader.require("use_routing_bias", True, hint=NOT_IMPLEMENTED)
    reader.require("shared_intermediate_size", 0, hint=NOT_IMPLEMENTED)
    reader.require("routed_scaling_factor", 1, hint=NOT_IMPLEMENTED)
    return {
        **expert_counts(reader, ("num_local_experts", "num_experts")),
        "intermediate_size": intermediate_size,
        "routing": "sigmoid_top_k",
        "normalizes_top_k": True,
        "has_choice_bias": True,
    }


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of a matrix per expert and projection: w1 gate, w3 up, w2 down.

    Or transformers' fused tensors.
    """
    block = f"{foreign}.block_sparse_moe"
    if f"{foreign}.mlp.experts.gate_up_proj" in stored_names:
        return {
            f"{canonical}.router": one(f"{foreign}.mlp.gate.weight"),
            f"{canonical}.router_choice_bias": one(f"{foreign}.mlp.e_score_correction_bias"),
            **joint_expert_names(f"{canonical}.experts", f"{foreign}.mlp.experts"),
        }
    return {
        f"{canonical}.router": one(f"{block}.gate.weight"),
        f"{canonical}.router_choice_bias": one(f"{block}.e_score_correction_bias"),
        **single_expert_names(f"{canonical}.experts", f"{block}.experts", moe.num_experts, ("w1", "w3", "w2")),
    }


FAMILY = Family(
    architectures=("MiniMaxM2ForCausalLM",),
    read_layers=read_layers,
    expert_names=expert_names,
    left_out=("model.mtp.", "mtp."),
)
