"""Tiny DFlash2 drafters, in the format of z-lab: a DFlash drafter with convolutions and a candidate selector."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.factories import edit_json, make_zlab_drafter, read_json

NUM_LAYERS = 2


def make_dflash2_drafter(
    path: Path,
    *,
    target_dir: Path,
    kernel_size: int = 2,
    group_size: int = 8,
    rank: int = 6,
    top_k: int = 4,
    window: int | None = 5,
    is_causal: bool = False,
    seed: int = 1,
    keys: dict[str, Any] | None = None,  # more of dflash_config
    **options: Any,
) -> Path:
    """Write a `DFlash2DraftModel`; by default all layers slide, as in those that are published."""
    slides = {"layer_types": ("sliding_attention",) * NUM_LAYERS, "sliding_window": window} if window else {}
    make_zlab_drafter(path, target_dir=target_dir, seed=seed, schema="new", is_causal=is_causal, **slides, **options)
    config = read_json(path / "config.json")
    conv = {"conv_kernel_size": kernel_size, "conv_group_size": group_size}
    selector = {"selector_rank": rank, "selector_top_k": top_k}
    section = config["dflash_config"] | conv | selector | (keys or {})
    edit_json(path / "config.json", architectures=["DFlash2DraftModel"], dflash_config=section)
    tensors = load_file(path / "model.safetensors")
    tensors |= dflash2_tensors(config, kernel_size=kernel_size, group_size=group_size, rank=rank, seed=seed)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def dflash2_tensors(
    config: dict[str, Any], *, kernel_size: int, group_size: int, rank: int, seed: int
) -> dict[str, torch.Tensor]:
    """Filters around the identity, and codebooks that change many choices."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def noise(gain: float, *shape: int) -> torch.Tensor:
        return gain * torch.randn(shape, generator=generator)

    tensors = {
        "candidate_selector.predecessor_codebook": noise(1.0, vocab, rank),
        "candidate_selector.successor_codebook": noise(1.0, vocab, rank),
        "candidate_selector.hidden_projection.weight": noise(hidden**-0.5, rank, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            base = noise(0.3, 2, kernel_size, hidden)
            base[:, 0] += 1
            rows = 2 * kernel_size * (hidden // group_size)
            tensors[f"{name}.base_kernel"] = base
            tensors[f"{name}.kernel_projection.weight"] = noise(0.3 * hidden**-0.5, rows, hidden)
    return tensors
