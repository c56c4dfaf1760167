"""Keys of EAGLE-3 drafters that their formats share -> fields of a DraftSpec."""

from collections.abc import Collection
from typing import Any

from dflash_trt.checkpoint.config_reader import ConfigReader
from dflash_trt.checkpoint.decoder_config import NOT_IMPLEMENTED, DecoderSizes, layers_of, read_layer_types, read_rope
from dflash_trt.core.model.eagle3 import MAX_CHAIN

DEFAULT_CHAIN = 7  # as TensorRT-LLM's recipes of gpt-oss draft; a chain has no length of its own

_DEFAULT_THETA = 10000.0  # transformers' LlamaConfig
_TAPS = "eagle_aux_hidden_state_layer_ids"


def read_chain(reader: ConfigReader, *, speculative_tokens: int | None) -> dict[str, Any]:
    """The algorithm's own keys. `speculative_tokens` is what the file recommends."""
    is_joint, is_per_tap = (reader.flag(name, default=False) for name in ("norm_before_fc", "fc_norm"))
    if is_joint and is_per_tap:
        reader.refuse("fc_norm", expected="false, as norm_before_fc is true", hint="Keep the one it was trained with.")
    chain = {
        "fc_norm": "joint" if is_joint else "per_tap" if is_per_tap else "none",
        "has_normed_residual": reader.flag("norm_before_residual", default=False),
        "has_normed_features": reader.flag("norm_output", default=False),
    }
    length = min(max(DEFAULT_CHAIN, speculative_tokens or 0), MAX_CHAIN)
    return {"algorithm": "eagle3", "chain": chain, "draft_block_size": length + 1}


def read_chain_layer(reader: ConfigReader, sizes: DecoderSizes, tensor_names: Collection[str]) -> list[dict[str, Any]]:
    """Fields of its LayerSpec. It is Llama's, or with norms of q and k Qwen3's.

    Speculators trains a chain over the `sliding_window` tokens up to its anchor, and over the chain itself.
    """
    reader.require("num_hidden_layers", 1, hint=NOT_IMPLEMENTED)
    reader.require("mlp_bias", False, hint=NOT_IMPLEMENTED)
    has_qk_norm = reader.value("model_type") == "qwen3" or any("self_attn.q_norm." in name for name in tensor_names)
    mixer = sizes.mixer_fields(reader) | {
        "rope": read_rope(reader, default_theta=_DEFAULT_THETA),
        "has_qk_norm": has_qk_norm,
    }
    is_sliding = read_layer_types(reader, sizes.num_layers) or (False,)
    window = reader.optional_integer("sliding_window", minimum=2)
    reader.ignore(("use_sliding_window", "max_window_layers"))
    mask: dict[str, Any] = {"first_key": 1}
    if any(is_sliding):
        if window is None:
            reader.refuse("sliding_window", expected="an integer, since the layer is sliding", hint="Add it.")
        mask |= {"window": (window or 2) - 1, "is_window_anchored": True}
    return layers_of(mixer, sizes.dense_fields(), [mask])


def read_taps(reader: ConfigReader, num_target_layers: int | None) -> tuple[int, ...]:
    """Tap i is the residual sum after layer i - 1, the input of layer i. By default SafeAILab's three."""
    ids = reader.optional_integers(_TAPS, minimum=1)
    if not ids and num_target_layers is None:
        reader.refuse(_TAPS, expected="a list of layers, numbered from 1", hint="Add the taps it was trained with.")
    if not ids:
        count = num_target_layers or 6
        ids = (2, count // 2, count - 3)
        reader.note(_TAPS, f"the inputs of layers {', '.join(map(str, ids))}, as in SafeAILab's EAGLE-3")
    return tuple(layer_id - 1 for layer_id in ids)
