"""Tiny random checkpoints of Gemma 3 and 4, as `tests/factories.py` makes those of other families."""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.factories import randomize, read_json, write_json

Gemma = Literal["gemma3_text", "gemma4_text", "gemma4_unified_text"]

_CLASSES: dict[Gemma, tuple[str, str]] = {
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}
EXPERTS: dict[str, Any] = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
PER_LAYER: dict[str, Any] = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 14,
}
# Experts, per-layer embeddings, shared K/V and V made of K in one model, which no checkpoint has.
EVERYTHING: dict[str, Any] = {
    **EXPERTS,
    **PER_LAYER,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_FULL_ROPE = {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25}
_DENSE: dict[str, Any] = {
    "rope_parameters": _ROPES | {"full_attention": _FULL_ROPE},
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 0.3,
    "hidden_size_per_layer_input": 0,
}
_FIELDS: dict[Gemma, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 20, "rope_parameters": _ROPES},
    "gemma4_text": _DENSE,
    "gemma4_unified_text": _DENSE,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def make_gemma(path: Path, *, family: Gemma, seed: int = 0, vocab_size: int = 12, **overrides: Any) -> Path:
    """Write a Hugging Face target and return its directory: 4 layers, hidden 64, 4 heads of 16, 2 K/V heads, windows
    of 6 tokens in all layers but the third and the last. `overrides` are fields of the family's config class.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _FULL],
        "sliding_window": 6,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    fields |= _FIELDS[family] | overrides
    config_class, model_class = (getattr(transformers, name) for name in _CLASSES[family])
    model = model_class(config_class(**fields))
    tensors = dict(model.named_parameters())
    scales = {name: tensor for name, tensor in model.named_buffers() if name.endswith("layer_scalar")}
    randomize(tensors, seed=seed, has_offset_norms=family == "gemma3_text")
    with torch.no_grad():  # scaled embeddings tied to the head repeat a token: what layers add must be larger
        tensors["model.embed_tokens.weight"].mul_(0.03)
        for i, scale in enumerate(scales.values()):
            scale.fill_(0.8 + 0.1 * i)
        for name, tensor in tensors.items():
            if name.endswith(("layernorm_1.weight", "layernorm_2.weight", "router.scale", "per_expert_scale")):
                tensor.mul_(0.1 * tensor.shape[-1] ** 0.5).add_(1.0)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return path


def nest(target: Path, path: Path, *, prefix: str, **outer: Any) -> Path:
    """The checkpoint of a model that also sees, whose language model `target` is."""
    path.mkdir()
    text = read_json(target / "config.json")
    write_json(path / "config.json", outer | {"text_config": text, "vision_config": {"depth": 2}})
    stored = load_file(target / "model.safetensors")
    tensors = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in stored.items()}
    tensors["vision_tower.norm.weight"] = torch.zeros(3)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path
