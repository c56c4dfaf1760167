"""Phi-3 and Phi-4: q, k and v are one matrix, gate and up another; RoPE may be partial, with LongRoPE.

Only the short one of LongRoPE's two tables of factors is implemented, for sequences of up to
`original_max_position_embeddings` tokens. A sequence that grew past them would need other keys for all its tokens.
"""

import math
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    DecoderSizes,
    layers_of,
    read_rope,
    read_rotary_dim,
    require_dense,
    rope_section,
)
from dflash_trt.checkpoint.families.base import Family, LayerFields
from dflash_trt.checkpoint.foreign_names import ForeignTable, stacked_rows
from dflash_trt.checkpoint.producers.base import require_known_producer
from dflash_trt.core.model.decoder import LayerSpec
from dflash_trt.core.model.feed_forward import Dense
from dflash_trt.core.model.gqa import Gqa

_ROPE_THETA = 10000.0  # transformers' default
_ORIGINAL_POSITIONS = 4096  # transformers' default
_LONGROPE = ("longrope", "su", "yarn")  # names that older files of this family have for it


def read_layers(reader: ConfigReader, sizes: DecoderSizes) -> list[LayerFields]:
    require_dense(reader)
    require_known_producer(reader)
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.require(name, False, hint=NOT_IMPLEMENTED)
    reader.require("full_attn_mod", 1, hint=NOT_IMPLEMENTED)
    reader.ignore(("interpolate_factor", "original_max_position_embeddings"))
    rotary_dim = read_rotary_dim(reader, sizes.head_dim, default=1.0)
    is_long = _is_longrope(reader)
    rope = _read_longrope(reader, sizes, rotary_dim) if is_long else _read_default_rope(reader)
    mixer = sizes.mixer_fields(reader) | {"rope": rope, "rotary_dim": rotary_dim}
    window = reader.optional_integer("sliding_window")
    return layers_of(mixer, sizes.dense_fields(), [{"window": window}] * sizes.num_layers)


def max_positions(reader: ConfigReader, trained: int) -> int:
    """Those of LongRoPE's short factors."""
    if not _is_longrope(reader):
        return trained
    positions = min(trained, _original_positions(reader))
    if positions < trained:
        reader.note("max_position_embeddings", f"{positions}, as far as LongRoPE's short factors go")
    return positions


def layer_names(canonical: str, foreign: str, layer: LayerSpec, hidden_size: int) -> ForeignTable:
    """The two matrices that hold several."""
    mixer, forward = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Gqa) and isinstance(forward, Dense)
    qkv, halves = (mixer.q_size, mixer.kv_size, mixer.kv_size), (forward.intermediate_size,) * 2
    return {
        f"{canonical}.qkv": stacked_rows(f"{foreign}.self_attn.qkv_proj.weight", qkv, (sum(qkv), hidden_size)),
        f"{canonical}.gate_up": stacked_rows(f"{foreign}.mlp.gate_up_proj.weight", halves, (sum(halves), hidden_size)),
    }


def _is_longrope(reader: ConfigReader) -> bool:
    section = rope_section(reader)
    return (section.optional_text("rope_type") or section.optional_text("type")) in _LONGROPE


def _original_positions(reader: ConfigReader) -> int:
    """The outer key, which transformers takes first."""
    name = "original_max_position_embeddings"
    return reader.optional_integer(name) or rope_section(reader).optional_integer(name) or _ORIGINAL_POSITIONS


def _read_default_rope(reader: ConfigReader) -> dict[str, Any]:
    section = rope_section(reader)
    section.require("rope_type", "default", hint=NOT_IMPLEMENTED)
    return read_rope(reader, default_theta=_ROPE_THETA, is_partial=True, ignored=("original_max_position_embeddings",))


def _read_longrope(reader: ConfigReader, sizes: DecoderSizes, rotary_dim: int) -> dict[str, Any]:
    """RopeSpec fields. Cosines and sines get the factor sqrt(1 + ln(trained / original) / ln(original))."""
    section, original = rope_section(reader), _original_positions(reader)
    theta = section.optional_number("rope_theta") or reader.optional_number("rope_theta") or _ROPE_THETA
    divisors = section.optional_numbers("short_factor") or ()
    if len(divisors) != rotary_dim // 2:
        section.refuse("short_factor", expected=f"{rotary_dim // 2} numbers, one for each pair that RoPE rotates")
    growth = section.optional_number("factor") or sizes.max_position_embeddings / original
    amplitude = section.optional_number("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    section.ignore(
        ("type", "rope_type", "long_factor", "partial_rotary_factor", "original_max_position_embeddings", "factor")
    )
    section.finish()
    return {"theta": theta, "scaling": "longrope", "divisors": divisors, "attention_factor": amplitude}


FAMILY = Family(
    architectures=("Phi3ForCausalLM",), read_layers=read_layers, layer_names=layer_names, max_positions=max_positions
)
