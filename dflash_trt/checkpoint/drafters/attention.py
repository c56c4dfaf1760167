"""Attention masks of a drafter's layers.

A wrong mask raises no error and only lowers acceptance. So every case is resolved by a rule here, with a note where
readers differ, or refused where a file contradicts itself.

z-lab's gpt-oss drafters have a config.json with little but model_type gpt_oss, and readers differ: transformers'
GptOssConfig has YaRN of factor 32 and windows of 128 in every other layer, PyPI `dflash` reads the file as Qwen3's and
uses neither. The published acceptance lengths were measured in SGLang, whose drafter then had YaRN and no windows.
"""

import json
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader, Fields
from dflash_trt.checkpoint.decoder_config import read_layer_types, require_sliding_window
from dflash_trt.checkpoint.families.gpt_oss import DEFAULT_ROPE, DEFAULT_WINDOW

MaskFields = dict[str, Any]  # fields of an AttentionMask

_QWEN3_MAX_WINDOW_LAYERS = 28  # the default of transformers' Qwen3Config
_OVERRIDE = "drafter_overrides may say otherwise"
_SAY_IT = "Add layer_types and is_causal as the drafter was trained."


def zlab_masks(reader: ConfigReader, num_layers: int) -> list[MaskFields]:
    """Masks by `is_causal`, else `causal`, else `use_swa` without layer_types, else per layer.

    By default sliding layers are causal and full ones are not; the explicit keys apply to every layer, and `use_swa`
    without layer_types makes all layers sliding and non-causal. Without layer_types, use_swa and use_sliding_window
    every layer is full.
    """
    is_causal = reader.optional_flag("is_causal")
    causal = reader.optional_flag("causal")
    is_sliding = read_layer_types(reader, num_layers)
    sliding_window = reader.optional_integer("sliding_window")
    swa_window_size = reader.optional_integer("swa_window_size")
    uses_swa = reader.flag("use_swa", default=False)
    if is_sliding is None and uses_swa:
        reader.ignore(("use_sliding_window", "max_window_layers"))
        window = sliding_window if swa_window_size is None else swa_window_size
        if window is None:
            reader.refuse("swa_window_size", expected="an integer, since use_swa is true", hint="Add it.")
        return [{"window": window, "is_causal": _first(is_causal, causal, False)}] * num_layers
    if is_sliding is None:
        is_sliding = _implied_layer_types(reader, num_layers)
    reader.ignore(("max_window_layers",))
    window = sliding_window
    if any(is_sliding):
        window = _window_in_use(reader, sliding_window)
        reader.require("swa_window_size", sliding_window, hint=_SAY_IT)
    else:
        reader.ignore(("use_sliding_window",))
        reader.require("use_swa", False, hint=f"No layer is sliding. {_SAY_IT}")
    return [
        {"window": window if slides else None, "is_causal": _first(is_causal, causal, slides)} for slides in is_sliding
    ]


def speculators_masks(reader: ConfigReader, num_layers: int, *, non_causal: bool) -> list[MaskFields]:
    """Full layers are always non-causal; sliding layers are causal unless `sliding_window_non_causal`.

    The window is anchored: Speculators trains all slots of a block over the `sliding_window` tokens before the anchor
    and over the whole block. `reader` reads transformer_layer_config.
    """
    is_sliding = read_layer_types(reader, num_layers)
    window = reader.optional_integer("sliding_window")
    if is_sliding is None:
        is_sliding = _implied_layer_types(reader, num_layers)
    reader.ignore(("max_window_layers", "use_sliding_window"))
    if any(is_sliding):
        window = _window_in_use(reader, window)
    sliding = {"window": window, "is_causal": not non_causal, "is_window_anchored": True}
    return [sliding if slides else {"is_causal": False} for slides in is_sliding]


def _implied_layer_types(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers are sliding without layer_types, as in transformers' Qwen3Config.

    With use_sliding_window and a window that is not null, layers from max_window_layers on are sliding. Some engines
    read full attention in every layer.
    """
    first_sliding = reader.optional_integer("max_window_layers", minimum=0)
    has_no_window = reader.is_given("sliding_window") and not reader.has("sliding_window")
    if not reader.flag("use_sliding_window", default=False) or has_no_window:
        return (False,) * num_layers
    first = _QWEN3_MAX_WINDOW_LAYERS if first_sliding is None else first_sliding
    num_sliding = max(0, num_layers - first)
    reader.note("layer_types", f"the last {num_sliding} of {num_layers} layers slide, as in transformers; {_OVERRIDE}")
    return tuple(i >= first for i in range(num_layers))


def _window_in_use(reader: ConfigReader, window: int | None) -> int | None:
    """The window of sliding layers; None if use_sliding_window is false, as in transformers.

    There an absent key is false, too, but here a file that names sliding layers and a window has them.
    """
    uses_window = reader.optional_flag("use_sliding_window")
    if uses_window is False:
        reader.note("use_sliding_window", f"layers that layer_types calls sliding have no window; {_OVERRIDE}")
        return None
    require_sliding_window(reader, window)
    if uses_window is None:
        reader.note("use_sliding_window", f"sliding layers have their window of {window} tokens; {_OVERRIDE}")
    return window


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)


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
