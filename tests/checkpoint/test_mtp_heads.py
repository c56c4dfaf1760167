"""MTP heads of targets: what a config and tensors say, what a note says, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.pair import open_pair, read_pair
from dflash_trt.checkpoint.sources import find_checkpoints
from dflash_trt.checkpoint.specs import read_specs
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.errors import CheckpointError, ConfigError, DFlashError
from tests.checkpoint.refusals import edit_tensors, weights_of
from tests.factories import Family, Tensors, edit_json, make_target, read_json, write_json
from tests.mtp_files import make_mtp_target

FAMILIES: tuple[Family, ...] = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4_moe")
UNSUPPORTED: tuple[Family, ...] = ("qwen3", "deepseek_v3", "minimax_m2")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_alone_gives_the_spec_that_tensors_prove(tmp_path: Path, family: Family) -> None:
    target = make_mtp_target(tmp_path / "target", family=family, tokenizer=False)
    pair, described = open_pair(target, target), read_specs(target, target)
    assert pair.draft == described.draft and pair.target == described.target
    assert pair.draft is not None and pair.draft.algorithm == "mtp" and pair.draft.max_draft_len == 7
    assert not any("drafting layers" in note or "tap" in note for note in (*pair.notes, *described.notes))
    assert pair.source_files == open_pair(target, None).source_files
    assert read_pair(target, target).draft == pair.draft


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_not_used_is_said_with_the_option_that_uses_it(tmp_path: Path, family: Family) -> None:
    target = make_mtp_target(tmp_path / "target", family=family, tokenizer=False)
    what = "num_nextn_predict_layers 1" if family == "glm4_moe" else "mtp.*"
    said = f"target config.json: the engine runs the language model without its own drafting layers ({what}); "
    assert f"{said}--drafter mtp drafts with them" in open_pair(target, None).notes
    plain = make_target(tmp_path / "plain", family=family, tokenizer=False, **_without_head(family))
    assert not any("drafting layers" in note for note in open_pair(plain, None).notes)


def _without_head(family: Family) -> dict[str, Any]:
    return {"num_mtp_layers": 0} if family == "glm4_moe" else {}


def test_the_drafter_mtp_is_the_target_s_own_checkpoint(tmp_path: Path) -> None:
    target = make_mtp_target(tmp_path / "target", tokenizer=False)
    found = find_checkpoints(BuildConfig(target="target", drafter="mtp"), tmp_path, needs_tensors=True)
    assert found.paths == {"target": target, "drafter": target} and found.config.drafter == "mtp"


def test_a_model_that_also_sees_has_its_head_outside_of_its_language_model(tmp_path: Path) -> None:
    target = make_mtp_target(tmp_path / "target", tokenizer=False)
    text, seeing = read_json(target / "config.json"), tmp_path / "seeing"
    seeing.mkdir()
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 2},
    }
    write_json(seeing / "config.json", outer | {"text_config": text | {"mtp_num_hidden_layers": 1}})
    tensors = load_file(target / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.visual.merger.weight": torch.zeros(3)}, seeing / "model.safetensors")
    found, expected = (weights_of(open_pair(path, path)) for path in (seeing, target))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    [note] = [note for note in open_pair(seeing, None).notes if "without" in note]
    assert note.endswith(
        "images, video and audio and its own drafting layers (mtp_num_hidden_layers 1); --drafter mtp drafts with them"
    )


def refused(target: Path, words: str, error: type[DFlashError] = ConfigError, **options: Any) -> None:
    with pytest.raises(error, match=words) as raised:
        open_pair(target, target, **options)
    assert type(raised.value) is error


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_families_whose_heads_are_not_implemented_are_named(tmp_path: Path, family: Family) -> None:
    target = make_target(tmp_path / "target", family=family, tokenizer=False)
    words = f"drafter mtp: expected a target of glm4_moe, .*qwen3_next, found {family}. Use another drafter"
    refused(target, words)
    with pytest.raises(ConfigError, match=words):
        read_specs(target, target)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3_5_text", "mtp_num_hidden_layers", 2),
        ("qwen3_5_text", "mtp_use_dedicated_embeddings", True),
        ("glm4_moe", "num_nextn_predict_layers", 2),
        ("glm4_moe", "num_nextn_predict_layers", 0),
    ],
)
def test_what_a_config_may_say_of_a_head_and_is_not_implemented_is_refused(
    tmp_path: Path, family: Family, key: str, value: Any
) -> None:
    target = make_mtp_target(tmp_path / "target", family=family, tokenizer=False)
    edit_json(target / "config.json", **{key: value})
    refused(target, f"target config.json key '{key}': expected .*, found {str(value).lower()}")


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path, family: Family) -> None:
    target = make_target(tmp_path / "target", family=family, tokenizer=False)
    refused(target, "drafter mtp: expected a tensor '.*', found none in the target's checkpoint")


def test_keys_of_the_drafter_s_config_cannot_be_overridden(tmp_path: Path) -> None:
    target = make_mtp_target(tmp_path / "target", tokenizer=False)
    refused(target, "drafter_overrides: expected none, found block_size", drafter_overrides={"block_size": 4})


def _remove(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3_5_text", _remove("mtp.norm.weight"), "mtp.norm.weight"),
        ("glm4_moe", _remove("model.layers.4.enorm.weight"), "model.layers.4.enorm.weight"),
        ("qwen3_5_text", lambda x: x.update({"mtp.layers.1.x.weight": torch.zeros(1)}), "mtp.layers.1.x.weight"),
        ("glm4_moe", lambda x: x.update({"model.layers.4.x.weight": torch.zeros(1)}), "model.layers.4.x.weight"),
    ],
)
def test_missing_and_unexpected_tensors_of_a_head_are_named(
    tmp_path: Path, family: Family, change: Callable[[Tensors], Any], words: str
) -> None:
    target = make_mtp_target(tmp_path / "target", family=family, tokenizer=False)
    edit_tensors(target, change)
    refused(target, words, CheckpointError)
