"""The recipe of a family, done: its file, a tiny checkpoint of transformers' own class, and its tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import SeedOssConfig, SeedOssForCausalLM

from dflash_trt.checkpoint import families
from dflash_trt.checkpoint.families.base import all_families
from dflash_trt.core.errors import CheckpointError, ConfigError
from tests.checkpoint.refusals import read_target_spec
from tests.contributing.conftest import AddModule
from tests.contributing.engines import build, generate
from tests.contributing.page import recipe
from tests.factories import edit_json, make_zlab_drafter, randomize

RECIPE = recipe("A target family")
PROMPT = [5, 9, 2, 3, 4, 1, 7, 8, 9, 6, 0, 11]
NUM_NEW = 32


@pytest.fixture
def seed_oss(add_module: AddModule) -> None:
    add_module(RECIPE, families, all_families)


def make_checkpoint(path: Path, **fields: Any) -> Path:
    config = SeedOssConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=16,
        **{"eos_token_id": None, "bos_token_id": None, "pad_token_id": None} | fields,
    )
    model = SeedOssForCausalLM(config)
    randomize(dict(model.named_parameters()), seed=0)
    model.save_pretrained(path)
    return path


def transformers_tokens(target: Path) -> list[int]:
    model = SeedOssForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokens: list[int] = model.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()
    return tokens[len(PROMPT) :]


def engine_tokens(target: Path, output: Path) -> list[int]:
    """With drafts, from the engine of the public build."""
    drafter = make_zlab_drafter(output / "drafter", target_dir=target, target_layer_ids=(0, 1))
    return generate(build(target, output / "engine", drafter=str(drafter)), PROMPT, NUM_NEW)[0]


def test_the_recipe_is_one_file() -> None:
    assert list(RECIPE.files) == ["dflash_trt/checkpoint/families/seed_oss.py"]
    assert "1 file" in RECIPE.heading and not RECIPE.patch


def test_without_the_file_the_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"architectures.*SeedOssForCausalLM"):
        read_target_spec(make_checkpoint(tmp_path / "target"))


@pytest.mark.usefixtures("seed_oss")
def test_its_tokens_are_those_of_transformers_and_not_those_of_one_changed_weight(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    expected = transformers_tokens(target)
    assert engine_tokens(target, tmp_path) == expected
    tensors = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] = tensors[name].roll(1, dims=0)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert engine_tokens(target, tmp_path / "changed") != expected


@pytest.mark.usefixtures("seed_oss")
def test_its_biases_are_those_of_transformers(tmp_path: Path) -> None:
    with_all = make_checkpoint(tmp_path / "target", attention_out_bias=True, mlp_bias=True)
    assert engine_tokens(with_all, tmp_path) == transformers_tokens(with_all)
    edit_json(with_all / "config.json", attention_out_bias=False)
    with pytest.raises(CheckpointError, match=r"unexpected.*o_proj\.bias"):
        engine_tokens(with_all, tmp_path / "without")
