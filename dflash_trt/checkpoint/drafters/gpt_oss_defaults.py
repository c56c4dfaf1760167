"""Defaults for z-lab's gpt-oss drafters, whose config.json has little but model_type gpt_oss.

Readers differ: transformers' GptOssConfig has YaRN of factor 32 and windows of 128 in every other layer, PyPI `dflash`
reads the file as Qwen3's and uses neither. The published acceptance lengths were measured in SGLang, whose drafter then
had YaRN and no windows. A wrong reading costs acceptance only.
"""

import json
from typing import Any

from dflash_trt.checkpoint.config_reader import Fields
from dflash_trt.checkpoint.families.gpt_oss import DEFAULT_ROPE, DEFAULT_WINDOW


def with_gpt_oss_defaults(fields: Fields, notes: list[str]) -> dict[str, Any]:
    """Add RoPE and layer types, with a note for each; `use_sliding_window` gives GptOssConfig's windows."""
    stated = dict(fields)
    if fields.get("model_type") != "gpt_oss":
        return stated
    if not any(fields.get(name) is not None for name in ("rope_scaling", "rope_parameters")):
        trained = fields.get("initial_context_length")
        stated["rope_scaling"] = DEFAULT_ROPE | (
            {"original_max_position_embeddings": trained} if trained is not None else {}
        )
        notes.append(
            "the drafter's config.json has model_type gpt_oss and no rope_scaling: YaRN of factor 32, as in SGLang; "
            f"override rope_scaling with {json.dumps({'rope_type': 'default'})} for unscaled RoPE"
        )
    if any(fields.get(name) is not None for name in ("layer_types", "use_swa")):
        return stated
    num_layers, slides = fields.get("num_hidden_layers"), fields.get("use_sliding_window")
    if slides is True and isinstance(num_layers, int):
        kinds = ("sliding_attention", "full_attention")
        stated["layer_types"] = [kinds[i % 2] for i in range(num_layers)]
        stated["sliding_window"] = fields.get("sliding_window") or DEFAULT_WINDOW
    elif slides is None:
        notes.append(
            "the drafter's config.json has model_type gpt_oss and no layer_types: full attention in every layer, as in "
            f"SGLang; override use_sliding_window with true for windows of {DEFAULT_WINDOW} tokens in every other layer"
        )
    return stated
