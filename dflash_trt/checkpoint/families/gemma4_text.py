"""Gemma 4, language model only: full layers have head sizes of their own and derive V from K.

Norms use w.
"""

from collections.abc import Collection, Sequence
from types import MappingProxyType
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, joint_expert_names, mlp_names, one, single_expert_names
from dflash_trt.checkpoint.gemma_layers import (
    ACTIVATION,
    FULL,
    LEFT_OUT,
    SLIDING,
    norm_names,
    read_model,
    read_ropes,
    read_sliding,
    read_window,
)
from dflash_trt.checkpoint.moe_config import expert_counts
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.feed_forward import Moe

_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

# Defaults of transformers' Gemma4TextConfig.
DEFAULTS: Final = MappingProxyType(
    {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
    }
)


_EXPERT_NORMS: Final = {
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "shared_post_norm": "post_feedforward_layernorm_1",
}
_FULL_SIZES: Final = ("global_head_dim", "num_global_key_value_heads")
_PER_LAYER: Final = {
    "per_layer_gate": "per_layer_input_gate",
    "per_layer_projection": "per_layer_projection",
    "per_layer_norm": "post_per_layer_input_norm",
}
_PER_LAYER_TABLE: Final = {
    "per_layer.embedding": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
}


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    reader.require("use_bidirectional_attention", "vision", hint="Attention that sees ahead is not implemented.")
    is_sliding = _read_sliding(reader, sizes.num_layers)
    sources = _read_sources(reader, is_sliding)
    mixers = _read_mixers(reader, sizes, is_sliding)
    is_wide = reader.flag("use_double_wide_mlp", default=False)
    fed = _read_feed_forward(reader, sizes)
    wide = fed | {"intermediate_size": 2 * sizes.intermediate_size}
    per_layer_size = reader.optional_integer("hidden_size_per_layer_input", minimum=0) or None
    return [
        {
            "mixer": {**mixers[SLIDING if slides else FULL], "mask": mask, "shares_kv_with": source},
            "feed_forward": wide if is_wide and source is not None else fed,
            "has_post_norms": True,
            "has_output_scale": True,
            "per_layer_size": per_layer_size,
        }
        for slides, mask, source in zip(is_sliding, read_window(reader, is_sliding), sources, strict=True)
    ]


def _read_sliding(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """The last layer is full, whatever the file says (transformers)."""
    is_sliding = read_sliding(reader, num_layers)
    if is_sliding and is_sliding[-1]:
        reader.note("layer_types", "the last layer has full attention, as in transformers")
    return (*is_sliding[:-1], False)


def _read_sources(reader: ConfigReader, is_sliding: tuple[bool, ...]) -> list[int | None]:
    """Source layers of the last layers, which have no K and V: the last layer of the same kind that has."""
    num_shared = reader.optional_integer("num_kv_shared_layers", minimum=0) or 0
    num_own = len(is_sliding) - num_shared
    if num_shared and not set(is_sliding) <= set(is_sliding[: max(num_own, 0)]):
        expected = "layers with K and V of their own of each kind"
        reader.refuse("num_kv_shared_layers", expected=expected, hint="Use a checkpoint that belongs to its file.")
        num_own = len(is_sliding)
    last = {slides: i for i, slides in enumerate(is_sliding[:num_own])}
    return [None if i < num_own else last[slides] for i, slides in enumerate(is_sliding)]


def _read_mixers(reader: ConfigReader, sizes: DecoderSizes, is_sliding: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Fields of a Gqa by kind of layer, without its mask."""
    ropes = read_ropes(reader, _ROPES)
    common = sizes.mixer_fields(reader) | {"has_qk_norm": True, "has_v_norm": True, "scale": 1.0}
    makes_v_of_k = reader.flag("attention_k_eq_v", default=False)
    if reader.has("per_layer_config"):
        reader.ignore(_FULL_SIZES)
        full_sizes = _read_per_layer(reader, sizes, is_sliding)
    else:
        head_dim, num_kv_heads = (reader.optional_integer(name) for name in _FULL_SIZES)
        full_sizes = {
            "head_dim": head_dim or sizes.head_dim,
            "num_kv_heads": (num_kv_heads if makes_v_of_k else None) or sizes.num_kv_heads,
        }
    full = common | full_sizes | {"rope": ropes[FULL]} | ({"has_v_proj": False} if makes_v_of_k else {})
    return {SLIDING: common | {"rope": ropes[SLIDING]}, FULL: full}


def _read_per_layer(reader: ConfigReader, sizes: DecoderSizes, is_sliding: Sequence[bool]) -> dict[str, int]:
    """Sizes of the full layers by layer, which transformers 5.15 and later write instead of the two keys."""
    layers = reader.optional_section("per_layer_config")
    assert layers is not None
    full = [str(i) for i, slides in enumerate(is_sliding) if not slides]
    found = []
    for name in full:
        layer = layers.optional_section(name)
        if layer is None:
            found.append((sizes.head_dim, sizes.num_kv_heads))
            continue
        head_dim, num_kv_heads = (layer.optional_integer(key) for key in ("head_dim", "num_key_value_heads"))
        layer.finish()
        found.append((head_dim or sizes.head_dim, num_kv_heads or sizes.num_kv_heads))
    layers.finish()
    if len(set(found)) > 1:
        reader.refuse("per_layer_config", expected="the same sizes in every layer of full attention")
    return {"head_dim": found[0][0], "num_kv_heads": found[0][1]}


def _read_feed_forward(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """A dense MLP, optionally with experts in addition."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not reader.flag("enable_moe_block", default=False):
        reader.ignore(names)
        return sizes.dense_fields() | {"activation": "gelu_tanh"}
    reader.require("use_double_wide_mlp", False, hint=NOT_IMPLEMENTED)
    return {
        **expert_counts(reader, ("num_experts",), chosen=("top_k_experts",)),
        "intermediate_size": reader.integer("moe_intermediate_size"),
        "routing": "scaled_softmax_top_k",
        "normalizes_top_k": True,
        "activation": "gelu_tanh",
        "shared_size": sizes.intermediate_size,
        "has_own_norms": True,
        "router_input_scale": sizes.hidden_size**-0.5,
    }


def read_target(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """Fields of a TargetSpec."""
    size = reader.optional_integer("hidden_size_per_layer_input", minimum=0)
    vocab_size = reader.optional_integer("vocab_size_per_layer_input") or sizes.vocab_size
    fields = read_model(reader, sizes)
    if not size:
        return fields
    if vocab_size < sizes.vocab_size:
        expected, hint = f"at least vocab_size {sizes.vocab_size}", "Every token needs a row."
        reader.refuse("vocab_size_per_layer_input", expected=expected, hint=hint)
    return fields | {"per_layer_embedding": {"size": size, "vocab_size": vocab_size}}


def own_names(model: str, spec: TargetSpec) -> ForeignTable:
    table = norm_names(model, spec)
    for i, layer in enumerate(spec.layers):
        ours, theirs = f"target.layers.{i}", f"{model}layers.{i}"
        table[f"{ours}.output_scale"] = one(f"{theirs}.layer_scalar")
        if layer.per_layer_size is not None:
            table |= {f"{ours}.{name}": one(f"{theirs}.{foreign}.weight") for name, foreign in _PER_LAYER.items()}
    if spec.per_layer_embedding is not None:
        table |= {f"target.{name}": one(f"{model}{foreign}.weight") for name, foreign in _PER_LAYER_TABLE.items()}
    return table


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of the experts, their router, and the layer's MLP and norms."""
    table: ForeignTable = {
        f"{canonical}.router": one(f"{foreign}.router.proj.weight"),
        f"{canonical}.router_norm": one(f"{foreign}.router.scale"),
        f"{canonical}.expert_scales": one(f"{foreign}.router.per_expert_scale"),
        **mlp_names(f"{canonical}.shared", f"{foreign}.mlp"),
    }
    table |= {f"{canonical}.{ours}": one(f"{foreign}.{theirs}.weight") for ours, theirs in _EXPERT_NORMS.items()}
    return table | _projection_names(canonical, foreign, moe, stored_names)


def _projection_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """All experts in one tensor, as published in bfloat16, or a matrix each, as quantization tools do."""
    places, kinds = (f"{foreign}.moe.experts", f"{foreign}.experts"), ("weight", "weight_packed")
    found = [place for place in places if any(f"{place}.0.down_proj.{kind}" in stored_names for kind in kinds)]
    if not found:
        return joint_expert_names(f"{canonical}.experts", places[1])
    return single_expert_names(f"{canonical}.experts", found[0], moe.num_experts)


FAMILY = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    read_layers=read_layers,
    activation=ACTIVATION,
    read_model=read_target,
    expert_names=expert_names,
    own_names=own_names,
    defaults=DEFAULTS,
    left_out=LEFT_OUT,
)
