"""A tiny Gemma 4 with every part of its family, quantized as published tools do it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.compressed_target import compress
from tests.checkpoint.test_quantized_gemma import LAST_MLP, UNQUANTIZED, exploded
from tests.gemma_targets import EVERYTHING, make_gemma

SLIDING, FULL = "sliding_attention", "full_attention"
FEW_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
FIELDS: dict[str, Any] = {
    **EVERYTHING,
    **FEW_HEADS,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, FULL],
    "num_kv_shared_layers": 1,
    "vocab_size_per_layer_input": 280,
}


def make_quantized_gemma(root: Path, name: str) -> Path:
    """Write ROOT/target in a format of `compressed_target.PUBLISHED`, and return it."""
    source = make_gemma(root / "source", family="gemma4_text", vocab_size=272, **FIELDS)
    tensors = load_file(source / "model.safetensors")  # their scales have the dtype of the weights
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(rounded, source / "model.safetensors", {"format": "pt"})
    compress(exploded(source, root / "exploded"), root / "target", name, ignored=(*UNQUANTIZED, LAST_MLP))
    return root / "target"
