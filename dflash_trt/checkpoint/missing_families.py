"""Families that are known and not implemented: what each would need, for the message that refuses it."""

from collections.abc import Mapping
from typing import Any, Final

_DEEPSEEK_V4 = "DeepSeek-V4 has hyper-connections and compressed caches: streams besides the residual, new states"
_MINIMAX_M3 = "MiniMax-M3 attends to blocks of its context that it chooses: an indexer besides the pages"
_QWEN3_VL = "Qwen3-VL's language model has a config and names of its own, which no family here reads"
_REASONS: Final = {
    "deepseek_ref": _DEEPSEEK_V4,
    "deepseek_v4": _DEEPSEEK_V4,
    "kimi_linear": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "kimi_k3": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "mimo": "MiMo-7B has a config of its own, which no family here reads",
    "mimo_v2_flash": "MiMo-V2 has heads whose V is narrower than K, and scales V: not implemented",
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "ministral3": "Ministral 3 has a temperature of scores, as Llama 4, but in layers with RoPE: not implemented",
    "mixtral": "Mixtral's experts have keys and names of their own, which no family here reads",
    "muse_glimmer": "Muse has layers of a kind of its own, which no public code describes",
    "nemotron-nas": "Nemotron-NAS has other sizes in each layer, and layers without attention or MLP: not implemented",
    "nemotron_h": "Nemotron-H has Mamba-2 layers: recurrent states of another kind",
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen4_exp": "its layers have n-gram embeddings, hyper-connections and sparse attention: none is implemented",
    "step3p7": "Step-3.7 has a config and names of its own, which no family here reads",
}


def missing_feature(fields: Mapping[str, Any]) -> str | None:
    """The unimplemented feature that a config.json's family needs; None for an unknown family."""
    inner = fields.get("text_config")
    types = [fields.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None]
    return next((_REASONS[name] for name in types if isinstance(name, str) and name in _REASONS), None)
