"""Families that are known and not implemented: what each would need, for the message that refuses it."""

from collections.abc import Mapping
from typing import Any, Final

_REASONS: Final = {
    "deepseek_v4": "DeepSeek-V4 has hyper-connections and compressed caches: streams beside the residual, new states",
    "kimi_linear": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "kimi_k3": "Kimi-K3 has delta attention whose decay is by channel: records of a recurrent state of that kind",
    "minimax_m3_vl": "MiniMax-M3 attends to blocks of its context that it chooses: an indexer beside the pages",
    "ministral3": "Ministral 3 has a temperature of scores, as Llama 4, but in layers with RoPE: not implemented",
    "muse_glimmer": "Muse has layers of a kind of its own, which no public code describes",
    "qwen4_exp": "its layers have n-gram embeddings, hyper-connections and sparse attention: none is implemented",
}


def missing_feature(fields: Mapping[str, Any]) -> str | None:
    """What the family of a config.json needs that is not implemented; None for one that nobody knows."""
    inner = fields.get("text_config")
    types = [fields.get("model_type"), inner.get("model_type") if isinstance(inner, dict) else None]
    return next((_REASONS[name] for name in types if isinstance(name, str) and name in _REASONS), None)
