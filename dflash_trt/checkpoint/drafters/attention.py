"""Attention masks of a drafter's layers.

A wrong mask raises no error and only lowers acceptance. So every case is either resolved by a rule here or refused.
"""

from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import read_layer_types, require_window

MaskFields = dict[str, Any]  # of an AttentionMask

_SAY_IT = "Add layer_types and is_causal as the drafter was trained."


def zlab_masks(reader: ConfigReader, num_layers: int) -> list[MaskFields]:
    """`is_causal` > `causal` > (`use_swa` without layer_types: all sliding, non-causal) > per-layer default.

    By default sliding layers are causal and full ones are not; the explicit keys apply to every layer. Without
    layer_types and use_swa every layer is full.
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
        is_sliding = (False,) * num_layers
        _refuse_implied_layer_types(reader, num_layers)
    reader.ignore(("max_window_layers",))
    window = sliding_window
    if any(is_sliding):
        require_window(reader, window)
        reader.require("swa_window_size", window, hint=_SAY_IT)
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
        is_sliding = (False,) * num_layers
        _refuse_implied_layer_types(reader, num_layers)
    reader.ignore(("max_window_layers", "use_sliding_window"))
    if any(is_sliding):
        require_window(reader, window)
    sliding = {"window": window, "is_causal": not non_causal, "is_window_anchored": True}
    return [sliding if slides else {"is_causal": False} for slides in is_sliding]


def _refuse_implied_layer_types(reader: ConfigReader, num_layers: int) -> None:
    """Refuse use_sliding_window without layer_types, which Hugging Face and other engines read differently."""
    first_sliding = reader.optional_integer("max_window_layers", minimum=0)
    if reader.flag("use_sliding_window", default=False) and (first_sliding is None or first_sliding < num_layers):
        reader.refuse("use_sliding_window", expected="layer_types beside it", hint=_SAY_IT)


def _first(*values: bool | None) -> bool:
    return next(value for value in values if value is not None)
