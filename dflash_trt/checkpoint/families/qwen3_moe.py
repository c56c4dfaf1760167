"""Qwen3-MoE: Qwen3's attention, and experts in most layers."""

from collections.abc import Collection

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_rope
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, joint_expert_names, one, single_expert_names
from dflash_trt.checkpoint.moe_config import softmax_moe
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.feed_forward import Moe


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    """Read the layers. Windows were never published and are refused."""
    require_known_producer(reader)
    mixer = sizes.mixer_fields(reader) | {"rope": read_rope(reader), "has_qk_norm": True}
    reader.require("qkv_bias", mixer["has_qkv_bias"], hint="Use attention_bias: it is the key that transformers reads.")
    reader.require("use_qk_norm", True, hint=NOT_IMPLEMENTED)
    reader.require("use_sliding_window", False, hint=NOT_IMPLEMENTED)
    reader.ignore(("sliding_window", "max_window_layers"))  # unused without use_sliding_window
    layers = layers_of(mixer, sizes.dense_fields(), sizes.full_masks())
    reader.require("shared_expert_intermediate_size", 0, hint=NOT_IMPLEMENTED)
    moe = softmax_moe(reader, normalizes=reader.flag("norm_topk_prob", default=False))
    for i in expert_layers(reader, sizes.num_layers):
        layers[i]["feed_forward"] = moe
    return layers


def expert_layers(reader: ConfigReader, num_layers: int) -> list[int]:
    """Every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = reader.optional_integer("decoder_sparse_step") or 1
    dense_layers = set(reader.optional_integers("mlp_only_layers") or ())
    return [i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense_layers]


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of a matrix per expert and projection, as published, or of transformers 5's fused tensors."""
    table: ForeignTable = {f"{canonical}.router": one(f"{foreign}.mlp.gate.weight")}
    experts = f"{foreign}.mlp.experts"
    if f"{experts}.gate_up_proj" in stored_names:
        return table | joint_expert_names(f"{canonical}.experts", experts)
    return table | single_expert_names(f"{canonical}.experts", experts, moe.num_experts)


FAMILY = Family(architectures=("Qwen3MoeForCausalLM",), read_layers=read_layers, expert_names=expert_names)
