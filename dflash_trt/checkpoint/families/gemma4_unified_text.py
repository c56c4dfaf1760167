"""Gemma 4 12B, the language model alone: a dense Gemma 4 without per-layer embeddings."""

from dataclasses import replace

from dflash_trt.checkpoint.families import gemma4_text

_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_DEFAULTS = {name: value for name, value in gemma4_text.DEFAULTS.items() if name not in _PER_LAYER} | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
}

FAMILY = replace(
    gemma4_text.FAMILY,
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    defaults=_DEFAULTS,
)
