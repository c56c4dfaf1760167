"""Experts with DeepSeek-V3's router, also in GLM-4.5 and Kimi-K2: keys of config.json, and names."""

from collections.abc import Collection
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes
from dflash_trt.checkpoint.families.qwen3_moe import expert_names as routed_names
from dflash_trt.checkpoint.foreign_names import ForeignTable, mlp_names, one
from dflash_trt.checkpoint.moe_config import TRAINING_KEYS, expert_counts
from dflash_trt.core.model.feed_forward import Moe

_UNUSED_KEYS = ("aux_loss_alpha", "seq_aux", "ep_size")


def read_feed_forwards(
    reader: ConfigReader, sizes: DecoderSizes, *, num_dense: int, scale: float, num_groups: int, num_chosen_groups: int
) -> list[dict[str, Any]]:
    """Fields of each layer's feed-forward, dense in the first layers. Numbers are a family's defaults."""
    first = reader.optional_integer("first_k_dense_replace", minimum=0)
    reader.require("moe_layer_freq", 1, hint=NOT_IMPLEMENTED)
    moe = _read_moe(reader, scale=scale, num_groups=num_groups, num_chosen_groups=num_chosen_groups)
    num_dense = num_dense if first is None else first
    types = reader.optional_texts("mlp_layer_types")
    if types is None:
        types = tuple("dense" if i < num_dense else "sparse" for i in range(sizes.num_layers))
    elif set(types) - {"dense", "sparse"} or len(types) != sizes.num_layers:
        reader.refuse("mlp_layer_types", expected=f"dense or sparse for each of {sizes.num_layers} layers")
    return [sizes.dense_fields() if name == "dense" else moe for name in types]


def _read_moe(reader: ConfigReader, *, scale: float, num_groups: int, num_chosen_groups: int) -> dict[str, Any]:
    reader.ignore((*TRAINING_KEYS, *_UNUSED_KEYS))
    reader.require("moe_router_dtype", "float32", hint="The router computes in float32.")
    reader.require("scoring_func", "sigmoid", hint=NOT_IMPLEMENTED)
    reader.require("topk_method", "noaux_tc", hint=NOT_IMPLEMENTED)
    expert_size = reader.integer("moe_intermediate_size")
    num_shared = reader.optional_integer("n_shared_experts", minimum=0)
    return {
        **expert_counts(reader, ("n_routed_experts", "num_local_experts", "num_experts")),
        "intermediate_size": expert_size,
        "routing": "sigmoid_top_k",
        "normalizes_top_k": reader.flag("norm_topk_prob", default=True),
        "routing_scale": reader.optional_number("routed_scaling_factor") or scale,
        "has_choice_bias": True,
        "num_groups": reader.optional_integer("n_group") or num_groups,
        "num_chosen_groups": reader.optional_integer("topk_group") or num_chosen_groups,
        "shared_size": expert_size * num_shared if num_shared else None,
    }


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of a router with a bias, of experts as in Qwen3-MoE, and of those that are shared."""
    table = routed_names(canonical, foreign, moe, stored_names) | {
        f"{canonical}.router_choice_bias": one(f"{foreign}.mlp.gate.e_score_correction_bias")
    }
    if moe.shared_size is not None:
        table |= mlp_names(f"{canonical}.shared", f"{foreign}.mlp.shared_experts")
    return table
