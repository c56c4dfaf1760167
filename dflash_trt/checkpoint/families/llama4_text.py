"""Llama 4, language model only.

Every fourth layer lacks RoPE and chunks; the router scales experts' inputs.
"""

from collections.abc import Collection
from types import MappingProxyType
from typing import Any, Final

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, read_rope
from dflash_trt.checkpoint.expert_tensors import ExpertLayout
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import (
    ForeignNames,
    ForeignTable,
    PairRows,
    PartRows,
    joint_expert_names,
    mlp_names,
    one,
    single_expert_names,
)
from dflash_trt.checkpoint.moe_config import TRAINING_KEYS, expert_counts
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.decoder import LayerSpec
from dflash_trt.core.model.feed_forward import Dense, Moe
from dflash_trt.core.model.gqa import Gqa

_ROPE_THETA = 500_000.0  # transformers' default
_NO_ROPE_EVERY = 4  # transformers' default
_UNUSED_KEYS = (*TRAINING_KEYS, "router_jitter_noise", "for_llm_compressor", "use_cache")

# Defaults of transformers' Llama4TextConfig: published files only have differences.
_DEFAULTS: Final = MappingProxyType(
    {
        "attention_chunk_size": 8192,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
)


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_known_producer(reader)
    reader.ignore(_UNUSED_KEYS)
    reader.require("attention_bias", False, hint=NOT_IMPLEMENTED)
    has_rope = _read_rope_layers(reader, sizes.num_layers)
    _check_layer_types(reader, has_rope)
    rotated, still = _read_mixers(reader, sizes)
    dense = {"kind": "dense", "intermediate_size": reader.integer("intermediate_size_mlp")}
    moe, expert_layers = _read_moe(reader, sizes), _read_expert_layers(reader, sizes.num_layers)
    return [
        {"mixer": rotated if rotates else still, "feed_forward": moe if i in expert_layers else dense}
        for i, rotates in enumerate(has_rope)
    ]


def _read_rope_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """`no_rope_layers` says 1 for a layer with RoPE; it may be empty."""
    every = reader.optional_integer("no_rope_layer_interval") or _NO_ROPE_EVERY
    given = reader.optional_integers("no_rope_layers", minimum=0)
    if not given:
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if len(given) != num_layers or set(given) - {0, 1}:
        reader.refuse("no_rope_layers", expected=f"1 or 0 for each of {num_layers} layers")
    return [bool(flag) for flag in given]


def _check_layer_types(reader: ConfigReader, has_rope: list[bool]) -> None:
    """Require chunks in RoPE layers: transformers masks by `layer_types`, rotates by `no_rope_layers`."""
    given = reader.optional_texts("layer_types")
    kinds = tuple("chunked_attention" if rotates else "full_attention" for rotates in has_rope)
    if given and given != kinds:
        expected = "chunked_attention for each layer that no_rope_layers rotates, full_attention for the others"
        reader.refuse(
            "layer_types", expected=expected, hint="Layers with one and without the other are not implemented."
        )


def _read_mixers(reader: ConfigReader, sizes: DecoderSizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a Gqa with RoPE and of one without. The q and k norm has no weight and commutes with RoPE."""
    common = sizes.mixer_fields(reader)
    rope = read_rope(reader, default_theta=_ROPE_THETA)
    is_normed, is_tempered = (reader.flag(name, default=True) for name in ("use_qk_norm", "attn_temperature_tuning"))
    chunk, interval = reader.integer("attention_chunk_size"), reader.integer("floor_scale")
    temperature = {"interval": interval, "scale": reader.number("attn_scale")}
    rotated = common | {"rope": rope, "has_qk_norm": is_normed, "mask": {"chunk": chunk}}
    still = {"theta": rope["theta"], "scaling": "proportional", "rotated_fraction": 0.0}
    return rotated, common | {"rope": still, "temperature": temperature if is_tempered else None}


def _read_expert_layers(reader: ConfigReader, num_layers: int) -> set[int]:
    step = reader.integer("interleave_moe_layer_step")
    given = reader.optional_integers("moe_layers", minimum=0)
    return set(range(step - 1, num_layers, step)) if given is None else set(given)


def _read_moe(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """`intermediate_size` is the size of one expert, and of the shared expert."""
    return {
        **expert_counts(reader, ("num_local_experts",)),
        "intermediate_size": sizes.intermediate_size,
        "routing": "sigmoid_top_k",
        "scales_inputs": True,
        "shared_size": sizes.intermediate_size,
    }


def layer_names(canonical: str, foreign: str, layer: LayerSpec, hidden_size: int) -> ForeignTable:
    """Projections with interleaved RoPE, norms without weights, and MLPs under a name of their own."""
    gqa = layer.mixer
    assert isinstance(gqa, Gqa)
    table: ForeignTable = {f"{canonical}.{norm}": ForeignNames(parts=(), recipe="ones") for norm in gqa.head_norms}
    if gqa.rope.rotated_fraction:
        parts = tuple(f"{foreign}.self_attn.{letter}_proj.weight" for letter in "qkv")
        shapes = [(size, hidden_size) for size in (gqa.q_size, gqa.kv_size, gqa.kv_size)]
        pairs = tuple(PairRows(head_dim=gqa.head_dim, stored_shape=shape) for shape in shapes[:2])
        values = PartRows(start=0, length=gqa.kv_size, stride=gqa.kv_size, stored_shape=shapes[2])
        table[f"{canonical}.qkv"] = ForeignNames(parts=parts, rows=(*pairs, values))
    if isinstance(layer.feed_forward, Dense):
        table |= mlp_names(canonical, f"{foreign}.feed_forward")
    return table


def expert_names(canonical: str, foreign: str, moe: Moe, stored_names: Collection[str]) -> ForeignTable:
    """Names of all experts' transposed matrices, gate before up.

    Or of one matrix per expert, if stored so.
    """
    forward = f"{foreign}.feed_forward"
    table: ForeignTable = {f"{canonical}.router": one(f"{forward}.router.weight")}
    table |= mlp_names(f"{canonical}.shared", f"{forward}.shared_expert")
    first = f"{forward}.experts.0.gate_proj"
    is_one_by_one = any(f"{first}.{name}" in stored_names for name in ("weight", "weight_packed"))
    if is_one_by_one:
        return table | single_expert_names(f"{canonical}.experts", f"{forward}.experts", moe.num_experts)
    return table | joint_expert_names(f"{canonical}.experts", f"{forward}.experts", ExpertLayout(is_transposed=True))


FAMILY = Family(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    read_layers=read_layers,
    expert_names=expert_names,
    layer_names=layer_names,
    defaults=_DEFAULTS,
    left_out=("vision_model.", "multi_modal_projector."),
)
