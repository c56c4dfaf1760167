"""A target's config.json and generation_config.json -> TargetSpec.

Knows Llama 3.x and dense Qwen3. It refuses every other architecture, and every key that it does not understand.
"""

from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.config_reader import ConfigReader, read_json_object, shown
from dflash_trt.checkpoint.decoder_config import (
    NOT_IMPLEMENTED,
    read_layer_types,
    read_rope,
    read_sizes,
    require_plain_decoder,
    require_window,
)
from dflash_trt.checkpoint.foreign_keys import HARMLESS_KEYS
from dflash_trt.checkpoint.modelopt_config import require_modelopt
from dflash_trt.core.errors import problem
from dflash_trt.core.model_spec import AttentionSpec, TargetSpec

_FAMILIES: dict[str, Literal["llama", "qwen3"]] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
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
    spec = TargetSpec(**spec_fields)
    _check_token_ids(spec, problems)
    return spec if len(problems) == num_problems else None


def _read_family(reader: ConfigReader) -> Literal["llama", "qwen3"] | None:
    architectures = reader.value("architectures")
    name = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    if not isinstance(name, str) or name not in _FAMILIES:
        reader.refuse("architectures", expected=f"one of {', '.join(_FAMILIES)}", mend="Use a supported target.")
        return None
    family = _FAMILIES[name]
    reader.require("model_type", family, default=family, mend=f"Correct the value: {name} is a {family} model.")
    return family


def _read_fields(reader: ConfigReader, family: Literal["llama", "qwen3"]) -> dict[str, Any]:
    """All fields but the end-of-sequence ids, which have a file of their own."""
    require_plain_decoder(reader)
    require_modelopt(reader)
    reader.require("final_logit_softcapping", mend=NOT_IMPLEMENTED)
    sizes = read_sizes(reader)
    has_attention_bias = reader.flag("attention_bias", default=False)
    is_qwen3 = family == "qwen3"
    return {
        **sizes.spec_fields(),
        "family": family,
        "vocab_size": sizes.vocab_size,
        "rope": read_rope(reader, default_theta=None if is_qwen3 else _LLAMA_ROPE_THETA),
        "attention": (_read_qwen3_attention if is_qwen3 else _read_llama_attention)(reader, sizes.num_layers),
        "has_qk_norm": is_qwen3,
        "has_qkv_bias": has_attention_bias,
        "has_o_bias": has_attention_bias,
        "has_mlp_bias": False if is_qwen3 else reader.flag("mlp_bias", default=False),
        "is_embedding_tied": reader.flag("tie_word_embeddings", default=False),
        "bos_token_id": reader.optional_integer("bos_token_id", minimum=0),
    }


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


def _check_token_ids(spec: TargetSpec, problems: list[str]) -> None:
    ids = [*spec.eos_token_ids, *(() if spec.bos_token_id is None else (spec.bos_token_id,))]
    outside = [token_id for token_id in ids if token_id >= spec.vocab_size]
    if outside:
        expected = f"ids below vocab_size {spec.vocab_size}"
        mend = "Correct eos_token_id or bos_token_id."
        problems.append(problem("target special tokens", expected=expected, found=shown(outside), mend=mend))
