"""Specs from config.json files alone are those that the tensors prove."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.pair import CheckpointPair, open_pair, read_pair
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.errors import ConfigError
from tests.checkpoint.expert_files import to_mxfp4
from tests.engine_dir.building import build
from tests.factories import make_speculators_drafter, make_target, make_zlab_drafter

MAKERS: dict[str, Any] = {"z-lab": make_zlab_drafter, "Speculators": make_speculators_drafter, "none": None}


def configs_of(path: Path, directory: Path) -> Path:
    """A directory with the config.json of a checkpoint and nothing else."""
    directory.mkdir()
    shutil.copy(path / "config.json", directory)
    return directory


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_oss"])
def test_specs_without_tensors_are_those_with_them(tmp_path: Path, family: Any, maker: str) -> None:
    target = make_target(tmp_path / "target", family=family)
    drafter = None if MAKERS[maker] is None else MAKERS[maker](tmp_path / "drafter", target_dir=target)
    expected = open_pair(target, drafter)
    found = read_specs(
        configs_of(target, tmp_path / "t"), None if drafter is None else configs_of(drafter, tmp_path / "d")
    )
    assert (found.target, found.draft, found.quantization) == (expected.target, expected.draft, expected.quantization)
    assert "only config.json files were read" in found.notes[0]


def test_formats_of_a_quantized_checkpoint_come_from_its_config(tmp_path: Path) -> None:
    target = configs_of(make_target(tmp_path / "target"), tmp_path / "t")
    section = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    (target / "hf_quant_config.json").write_text(section)
    found = read_specs(target, None)
    layers = range(found.target.num_layers)
    names = {f"target.layers.{i}.{name}" for i in layers for name in ("qkv", "o", "gate_up", "down")}
    assert found.quantization.linears == dict.fromkeys(names, "fp8")
    assert found.quantization.target_kv is not None


def test_experts_in_mxfp4_are_known_from_the_config(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", family="gpt_oss")
    to_mxfp4(target)
    expected = open_pair(target, None)
    found = read_specs(configs_of(target, tmp_path / "t"), None)
    assert found.quantization == expected.quantization
    assert set(found.quantization.linears.values()) == {"mxfp4"}


@pytest.mark.parametrize("read", [read_specs, open_pair])
def test_an_engine_is_no_checkpoint(tmp_path: Path, read: Callable[..., object]) -> None:
    engine = tmp_path / "engine"
    build(tmp_path, engine, target=str(make_target(tmp_path / "target")), max_seq_len=64)
    with pytest.raises(ConfigError, match=r"^target .*engine: expected a checkpoint directory, found an engine\."):
        read(engine, None)


def test_every_wrong_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"target .*none: expected a checkpoint directory(.|\n)*drafter .*nowhere: expected"
    ):
        read_specs(tmp_path / "none", tmp_path / "nowhere")
    target = configs_of(make_target(tmp_path / "target"), tmp_path / "t")
    other = make_target(tmp_path / "other", vocab_size=300)
    drafter = configs_of(make_zlab_drafter(tmp_path / "drafter", target_dir=other), tmp_path / "d")
    with pytest.raises(ConfigError, match="drafter vocab_size"):
        read_specs(target, drafter)


def test_formats_of_a_drafter_are_its_own_and_parts_of_several_make_no_layer_of_one(tmp_path: Path) -> None:
    """As the tensors are named: of a fused layer that is quantized in part, nothing is known without them."""
    target = make_target(tmp_path / "target")
    drafter = configs_of(make_zlab_drafter(tmp_path / "drafter", target_dir=target), tmp_path / "d")
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*v_proj", "layers.1*", "fc"]}
    (drafter / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    found = read_specs(target, drafter)
    assert found.quantization.linears == {f"draft.layers.0.{name}": "fp8" for name in ("q", "o", "gate_up", "down")}
    assert found.quantization.target_kv is None
    [note] = [note for note in found.notes if "stored in" in note]
    assert note.startswith("drafter: 4 linear layers are stored in fp8; their activations are quantized with")


def test_tensors_are_proven_where_both_directories_have_some(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    bare = configs_of(drafter, tmp_path / "d")
    assert isinstance(read_pair(target, drafter), CheckpointPair) and isinstance(
        read_pair(target, None), CheckpointPair
    )
    found = read_pair(target, bare, drafter_overrides={"block_size": 7})
    assert not isinstance(found, CheckpointPair)
    assert found.draft is not None and found.draft.draft_block_size == 7
