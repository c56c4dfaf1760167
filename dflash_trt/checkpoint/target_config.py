"""A target's config.json and generation_config.json -> TargetSpec.

Knows Llama 3.x, Qwen3, Qwen3-MoE and gpt-oss. It refuses every other architecture, and every key that it does not
understand.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    DecoderSizes,
    read_layer_types,
    read_rope,
    read_sizes,
    require_dense,
    require_plain_decoder,
    require_window,
)
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS
from dflash_trt.checkpoint.modelopt_config import require_modelopt, require_mxfp4
from dflash_trt.checkpoint.moe_config import read_gpt_oss_moe, read_qwen3_moe
from dflash_trt.core.frozen import checked
from dflash_trt.core.model_spec import AttentionSpec, TargetSpec

Family = Literal["llama", "qwen3", "qwen3_moe", "gpt_oss"]

_FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
_LABEL = "target config.json"
_LLAMA_ROPE_THETA = 10000.0  # Hugging Face's default; Llama files older than rope_theta rely on it


def parse_target(directory: Path, problems: list[str]) -> TargetSpec | None:
    """The spec of the target in `directory`; None when `problems` has grown."""
    num_problems = len(problems)
    fields = read_json_object(directory / "config.json", label=_LABEL, problems=problems)
    if fields is None:
        return None
    reader = ConfigReader(fields, label=_LABEL, problems=problems)
    family = _read_family(reader)
    if family is None:
        return None  # the other keys of a foreign architecture would only be noise
    spec_fields = _read_fields(reader, family)
    spec_fields["eos_token_ids"] = _read_eos(directory, reader, problems)
    reader.ignore(HARMLESS_KEYS)
    reader.finish()
    if len(problems) > num_problems:
        return None
    return checked(TargetSpec, spec_fields, label=_LABEL, problems=problems)


def _read_family(reader: ConfigReader) -> Family | None:
    architectures = reader.value("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in _FAMILIES:
        reader.refuse("architectures", expected=f"one of {', '.join(_FAMILIES)}", mend="Use a supported target.")
        return None
    family = _FAMILIES[name]
    reader.require("model_type", family, default=family, mend=f"Correct the value: {name} is a {family} model.")
    return family


def _read_fields(reader: ConfigReader, family: Family) -> dict[str, Any]:
    """All fields but the end-of-sequence ids, which have a file of their own."""
    require_plain_decoder(reader)
    reader.require("final_logit_softcapping", mend=NOT_IMPLEMENTED)
    sizes = read_sizes(reader)
    return {
        **sizes.spec_fields(),
        "family": family,
        "vocab_size": sizes.vocab_size,
        "is_embedding_tied": reader.flag("tie_word_embeddings", default=False),
        "bos_token_id": reader.optional_integer("bos_token_id", minimum=0),
        **_FAMILY_FIELDS[family](reader, sizes),
    }


def _read_llama(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    require_dense(reader)
    require_modelopt(reader)
    return {
        **_attention_biases(reader, default=False),
        "rope": read_rope(reader, default_theta=_LLAMA_ROPE_THETA),
        "attention": _read_llama_attention(reader, sizes.num_layers),
        "has_qk_norm": False,
        "has_mlp_bias": reader.flag("mlp_bias", default=False),
    }


def _read_qwen3(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    require_dense(reader)
    require_modelopt(reader)
    return {
        **_attention_biases(reader, default=False),
        "rope": read_rope(reader),
        "attention": _read_qwen3_attention(reader, sizes.num_layers),
        "has_qk_norm": True,
    }


def _read_qwen3_moe(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """Like Qwen3. Its files repeat what the architecture fixes; a window was never published and is refused."""
    require_modelopt(reader)
    biases = _attention_biases(reader, default=False)
    reader.require(
        "qkv_bias", biases["has_qkv_bias"], mend="Use attention_bias: it is the key that transformers reads."
    )
    reader.require("use_qk_norm", True, mend=NOT_IMPLEMENTED)
    reader.require("use_sliding_window", False, mend=NOT_IMPLEMENTED)
    reader.ignore(("sliding_window", "max_window_layers"))  # without use_sliding_window they mean nothing
    return {
        **biases,
        "rope": read_rope(reader),
        "attention": (AttentionSpec(),) * sizes.num_layers,
        "has_qk_norm": True,
        "moe": read_qwen3_moe(reader, sizes.num_layers),
    }


def _read_gpt_oss(reader: ConfigReader, sizes: DecoderSizes) -> dict[str, Any]:
    """Sinks, and windows in every other layer, the first among them, unless layer_types says otherwise."""
    require_mxfp4(reader)
    reader.ignore(("initial_context_length",))  # repeats the RoPE's original_max_position_embeddings
    if not (reader.has("rope_scaling") or reader.has("rope_parameters")):
        mend = 'Add "rope_scaling" as the checkpoint was trained (the published ones: yarn, factor 32).'
        reader.refuse("rope_scaling", expected="an explicit RoPE scaling, as model_type is gpt_oss", mend=mend)
    is_sliding = read_layer_types(reader, sizes.num_layers)
    if is_sliding is None:
        is_sliding = tuple(i % 2 == 0 for i in range(sizes.num_layers))
    window = reader.optional_integer("sliding_window")
    if window is None and any(is_sliding):
        reader.refuse("sliding_window", expected="an integer, as some layers are sliding", mend="Add it.")
    return {
        **_attention_biases(reader, default=True),
        "rope": read_rope(reader),
        "attention": tuple(AttentionSpec(window=window if slides else None) for slides in is_sliding),
        "has_qk_norm": False,
        "has_sinks": True,
        "moe": read_gpt_oss_moe(reader, sizes.num_layers, sizes.intermediate_size),
    }


_FAMILY_FIELDS: dict[Family, Callable[[ConfigReader, DecoderSizes], dict[str, Any]]] = {
    "llama": _read_llama,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "gpt_oss": _read_gpt_oss,
}


def _attention_biases(reader: ConfigReader, *, default: bool) -> dict[str, bool]:
    has_bias = reader.flag("attention_bias", default=default)
    return {"has_qkv_bias": has_bias, "has_o_bias": has_bias}


def _read_llama_attention(reader: ConfigReader, num_layers: int) -> tuple[AttentionSpec, ...]:
    reader.require("sliding_window", mend="Llama has no sliding window: remove the key.")
    return (AttentionSpec(),) * num_layers


def _read_qwen3_attention(reader: ConfigReader, num_layers: int) -> tuple[AttentionSpec, ...]:
    """Per-layer windows: `layer_types`, else layers from max_window_layers on when use_sliding_window is true."""
    window = reader.optional_integer("sliding_window")
    layer_types = read_layer_types(reader, num_layers)
    max_window_layers = reader.optional_integer("max_window_layers", minimum=0)
    uses_window = reader.flag("use_sliding_window", default=False)
    if layer_types is None and uses_window:
        if max_window_layers is None:
            reader.refuse("max_window_layers", expected="an integer, as use_sliding_window is true", mend="Add it.")
        layer_types = tuple(i >= (max_window_layers or 0) for i in range(num_layers))
    if layer_types is None or not any(layer_types):
        return (AttentionSpec(),) * num_layers
    require_window(reader, window)
    return tuple(AttentionSpec(window=window if is_sliding else None) for is_sliding in layer_types)


def _read_eos(directory: Path, reader: ConfigReader, problems: list[str]) -> tuple[int, ...]:
    """generation_config.json's ids if it has any, else config.json's."""
    own = reader.optional_integers("eos_token_id") or ()
    path = directory / "generation_config.json"
    if not path.is_file():
        return own
    label = "target generation_config.json"
    fields = read_json_object(path, label=label, problems=problems)
    if fields is None:
        return own
    return ConfigReader(fields, label=label, problems=problems).optional_integers("eos_token_id") or own
