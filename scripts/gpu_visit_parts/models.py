"""Engines of recipes at their published size, with random weights made on the GPU: no checkpoint is needed."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dflash_trt.backends.torch import loading
from dflash_trt.core.dtype import stored_dtype, torch_dtype
from dflash_trt.engine_dir import EngineDir, tensor_headers
from dflash_trt.recipes import recipes
from gpu_visit_parts.setting import SETTING, LeftOutError
from scripts.recipe_engine import TOKENIZER, write_engine

_E8M0_SCALES = (116, 122)  # 2 ** -11 .. 2 ** -6: outputs of the size of the inputs


@contextmanager
def recipe_engine(name: str) -> Iterator[EngineDir]:
    """The engine of a recipe for one GPU. Wherever it is opened meanwhile, its weights are random."""
    (recipe,) = (recipe for recipe in recipes() if recipe.name == name)
    with TemporaryDirectory(prefix="gpu-visit-") as directory, patch.object(loading, "_read_tensors", random_tensors):
        changes = _tiny_pair(Path(directory)) if SETTING.is_dry_run else {}
        described = write_engine(recipe, Path(directory), capability=SETTING.capability, changes=changes)
        if described.pretrained_config.mapping.world_size > 1:
            raise LeftOutError("the recipe is for several GPUs")
        yield EngineDir.open(Path(directory) / "engine")


def _tiny_pair(directory: Path) -> dict[str, Any]:
    """The demo's configs with one layer each, and limits of two short requests."""
    names = ("target", "drafter")
    for name in names:
        config = json.loads((TOKENIZER.parent / name / "config.json").read_text())
        config |= {
            "num_hidden_layers": 1,
            "layer_types": ["full_attention"],
            "hidden_size": 128,
            "intermediate_size": 64,
        }
        if "dflash_config" in config:
            config |= {"num_target_layers": 1, "dflash_config": config["dflash_config"] | {"target_layer_ids": [0]}}
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    limits = {"max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 16, "page_size": 16}
    return limits | {name: str(directory / name) for name in names}


def random_tensors(engine: EngineDir, rank: int, device: str) -> dict[str, Tensor]:
    """Instead of those of a rank's file: activations stay near 1, and routers choose evenly."""
    headers = tensor_headers(engine.manifest.pretrained_config)
    return {
        name: _random(name, header.shape, torch_dtype(stored_dtype(header.dtype) or ""), device)
        for name, header in headers.items()
    }


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    if dtype is torch.uint8:
        low, high = _E8M0_SCALES if name.endswith("block_scale") else (0, 256)
        return torch.randint(low, high, shape, dtype=dtype, device=device)
    if name.endswith(("weight_scale", "block_scale")):  # of codes up to 448 or 7
        value = 2e-4 if dtype is torch.float32 else 4e-3
        return torch.full(shape, value, dtype=torch.float32, device=device).to(dtype)
    if name.endswith("input_scale"):
        return torch.full(shape, 0.02, dtype=dtype, device=device)
    if dtype is torch.float8_e4m3fn:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(64).to(dtype)
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=dtype, device=device)
    scale = 1.0 if name.endswith("embedding") else 1 / math.sqrt(shape[-1])
    return torch.randn(shape, dtype=dtype, device=device).mul_(scale)
