"""gpt-oss: attention sinks, windows in every other layer, experts in MXFP4."""

from collections.abc import Collection
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import DecoderSizes, layers_of, read_layer_types, read_rope, window_masks
from dflash_trt.checkpoint.expert_tensors import ExpertLayout
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, expert_tensors, one
from dflash_trt.checkpoint.moe_config import TRAINING_KEYS, expert_counts
from dflash_trt.checkpoint.mxfp4_config import require_mxfp4
from dflash_trt.core.model.feed_forward import Moe

_SWIGLU_LIMIT, _SWIGLU_ALPHA = 7.0, 1.702  # alpha is in no config.json

# Defaults of transformers' GptOssConfig, which vLLM and SGLang read, too.
DEFAULT_WINDOW = 128
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_mxfp4(reader)
    reader.ignore(("initial_context_length",))  # repeats the RoPE's original_max_position_embeddings
    if not (reader.has("rope_scaling") or reader.has("rope_parameters")):
        reader.note("rope_scaling", "YaRN of factor 32, as in transformers; add the key for another")
    masks = _read_masks(reader, sizes.num_layers)
    mixer = sizes.mixer_fields(reader, has_biases=True) | {
        "rope": read_rope(reader, default_scaling=DEFAULT_ROPE),
        "has_sinks": True,
    }
    return layers_of(mixer, _read_moe(reader, sizes.intermediate_size), masks)


def _read_masks(reader: ConfigReader, num_layers: int) -> list[dict[str, Any]]:
    """Windows in every other layer, from the first on, unless there are layer_types."""
    is_sliding = read_layer_types(reader, num_layers)
    if is_sliding is None:
        is_sliding = tuple(i % 2 == 0 for i in range(num_layers))
    window = reader.optional_integer("sliding_window")
    if any(is_sliding) and not reader.is_given("sliding_window"):
        reader.note("sliding_window", f"{DEFAULT_WINDOW}, as in transformers; add the key for another")
        window = DEFAULT_WINDOW
    return window_masks(reader, is_sliding, window)


def _read_moe(reader: ConfigReader, intermediate_size: int) -> dict[str, Any]:
    """Experts with biases; `intermediate_size` is the size of one expert."""
    reader.ignore(TRAINING_KEYS)
    return {
        **expert_counts(
            reader, ("num_local_experts", "num_experts"), chosen=("num_experts_per_tok", "experts_per_token")
        ),
        "intermediate_size": intermediate_size,
        "routing": "top_k_softmax",
        "activation": "clamped_swiglu",
        "limit": reader.optional_number("swiglu_limit") or _SWIGLU_LIMIT,
        "alpha": _SWIGLU_ALPHA,
        "has_bias": True,
    }


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of MXFP4 blocks and scales, as published, or of bfloat16 conversions' transposed matrices."""
    experts = f"{foreign}.mlp.experts"
    table: ForeignTable = {
        f"{canonical}.router": one(f"{foreign}.mlp.router.weight"),
        f"{canonical}.router_bias": one(f"{foreign}.mlp.router.bias"),
    }
    for name, is_interleaved in (("gate_up", True), ("down", False)):
        weight = f"{experts}.{name}_proj"
        bias_layout = ExpertLayout(is_interleaved=is_interleaved)
        table[f"{canonical}.experts.{name}_bias"] = expert_tensors(f"{weight}_bias", layout=bias_layout)
        if weight in stored_names:
            layout = ExpertLayout(is_transposed=True, is_interleaved=is_interleaved)
            table[f"{canonical}.experts.{name}"] = expert_tensors(weight, layout=layout)
        else:
            layout = ExpertLayout(is_mxfp4=True, is_interleaved=is_interleaved)
            table[f"{canonical}.experts.{name}"] = expert_tensors(f"{weight}_blocks", f"{weight}_scales", layout=layout)
    return table


FAMILY = Family(architectures=("GptOssForCausalLM",), read_layers=read_layers, expert_names=expert_names)
