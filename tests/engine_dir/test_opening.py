import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.core.errors import EngineDirError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir import opening as opening_module
from tests.engine_dir.building import COMMAND
from tests.factories import edit_json, read_json, write_json


def test_an_engine_opens_with_what_it_was_built_from(built: Path) -> None:
    engine = EngineDir.open(built, verify_hashes=True)
    assert engine.manifest.draft is not None
    assert engine.manifest.target.num_layers == 4
    assert engine.manifest.build_config.max_draft_len == engine.manifest.draft.max_draft_len == 3
    assert engine.tokenizer_path == built / "tokenizer"
    assert engine.weights_path(0) == built / "rank0.safetensors"
    assert engine.provenance()["command"] == list(COMMAND)


def test_an_engine_may_be_moved(built: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(built, tmp_path / "elsewhere")
    assert EngineDir.open(moved).manifest == EngineDir.open(built).manifest


def test_files_other_than_tokenizer_files_may_be_added(engine: Path) -> None:
    (engine / "NOTES.txt").write_text("mine")
    EngineDir.open(engine)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nothing", ["expected an engine directory", "found nothing at that path", "dflash-trt build"]),
        ("file", ["found a file"]),
        ("empty", ["no config.json"]),
        ("target", ["found a model checkpoint", "dflash-trt build --target"]),
    ],
)
def test_what_is_no_engine_directory_is_refused(checkpoints: Path, tmp_path: Path, path: str, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    where = checkpoints / path if path == "target" else tmp_path / path
    _assert_refused(where, *said)


def test_another_version_is_refused_before_anything_else(engine: Path) -> None:
    edit_json(engine / "config.json", version=2, nonsense=True)
    _assert_refused(
        engine, "expected engine version 1, found version 2", "dflash-trt build pair.yaml -o engine --overwrite"
    )


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b""])
def test_a_config_that_is_no_json_object_is_refused(engine: Path, content: bytes) -> None:
    (engine / "config.json").write_bytes(content)
    _assert_refused(engine, "config.json: expected a JSON object")


def test_unknown_and_missing_keys_are_refused_at_every_level(engine: Path) -> None:
    fields = read_json(engine / "config.json")
    fields["pretrained_config"]["target"]["is_moe"] = True
    fields["build_config"]["max_beam_width"] = 1
    del fields["pretrained_config"]["dtype"]
    write_json(engine / "config.json", fields)
    _assert_refused(
        engine,
        "3 problems",
        "'pretrained_config.target.is_moe': expected a known key",
        "'build_config.max_beam_width': expected a known key",
        "'pretrained_config.dtype': expected a value, found none",
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("build_config", "max_draft_len", 4, "max_draft_len of at most 3"),
        ("build_config", "max_batch_size", "4", "integer"),
        ("build_config", "max_batch_size", 0, "greater than or equal to 1"),
        ("pretrained_config", "quantization", "fp8", "expected an object"),
        ("pretrained_config", "dtype", "int8", "float32"),
        ("pretrained_config", "mapping", {"world_size": 2, "tp_size": 2, "pp_size": 1, "rank": 1}, "mapping.rank 0"),
    ],
)
def test_a_value_out_of_range_is_refused(engine: Path, section: str, key: str, value: object, said: str) -> None:
    fields = read_json(engine / "config.json")
    fields[section][key] = value
    write_json(engine / "config.json", fields)
    _assert_refused(engine, said)


@pytest.mark.parametrize("name", ["/etc/passwd", "../target/config.json", "tokenizer/../x", "config.json", "."])
def test_file_names_that_leave_the_directory_are_refused(engine: Path, name: str) -> None:
    fields = read_json(engine / "config.json")
    fields["files"][name] = {"sha256": "0" * 64, "size_bytes": 0}
    write_json(engine / "config.json", fields)
    _assert_refused(engine, "a plain path inside the engine directory")


def test_another_step_contract_is_refused(engine: Path) -> None:
    fields = read_json(engine / "config.json")
    fields["step"]["inputs"][0]["name"] = "input_ids"
    write_json(engine / "config.json", fields)
    _assert_refused(engine, "step tensors", "input_ids, token_ids")


def test_missing_truncated_and_changed_files_are_refused_in_one_error(engine: Path) -> None:
    (engine / "provenance.json").unlink()
    weights = engine / "rank0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = engine / "tokenizer/tokenizer_config.json"
    config.write_bytes(config.read_bytes().replace(b"e", b"3"))
    size_bytes = weights.stat().st_size
    _assert_refused(
        engine,
        "3 problems",
        "provenance.json: expected a file, found none",
        f"rank0.safetensors: expected {size_bytes + 1} bytes, found {size_bytes}",
        "tokenizer/tokenizer_config.json: expected sha256",
    )


def test_a_file_put_among_the_tokenizer_files_is_refused(engine: Path) -> None:
    (engine / "tokenizer/chat_template.jinja").write_text("{{ messages }}")
    _assert_refused(engine, "tokenizer/chat_template.jinja: expected only files that config.json lists")


def test_large_files_are_hashed_only_when_asked(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = engine / "rank0.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    _assert_refused(engine, "rank0.safetensors: expected sha256")
    monkeypatch.setattr(opening_module, "MAX_ALWAYS_HASHED_BYTES", 100_000)
    EngineDir.open(engine)
    with pytest.raises(EngineDirError, match=r"rank0\.safetensors: expected sha256"):
        EngineDir.open(engine, verify_hashes=True)


def test_tensors_that_differ_from_the_tables_are_refused(engine: Path) -> None:
    tensors = load_file(engine / "rank0.safetensors")
    tensors["target.norm"] = torch.zeros(63)
    tensors["draft.extra"] = torch.zeros(1)
    tensors["draft.norm"] = tensors["draft.norm"].to(torch.bfloat16)
    del tensors["draft.fc"]
    save_file(tensors, engine / "rank0.safetensors")
    _relist(engine, "rank0.safetensors")
    _assert_refused(
        engine,
        "4 problems",
        "'target.norm': expected F32 [64], found F32 [63]",
        "'draft.extra': expected no such tensor, found F32 [1]",
        "'draft.norm': expected F32 [64], found BF16 [64]",
        "'draft.fc': expected F32 [64, 128], found no such tensor",
    )


def test_a_list_of_very_many_wrong_tensors_is_cut(engine: Path) -> None:
    save_file({"x": torch.zeros(1)}, engine / "rank0.safetensors")
    _relist(engine, "rank0.safetensors")
    with pytest.raises(EngineDirError, match="more tensors differ") as caught:
        EngineDir.open(engine)
    assert len(str(caught.value).splitlines()) < 12


def test_weights_that_are_no_safetensors_are_refused(engine: Path) -> None:
    (engine / "rank0.safetensors").write_bytes(b"not tensors at all")
    _relist(engine, "rank0.safetensors")
    _assert_refused(engine, "rank0.safetensors: expected a safetensors file")


def _relist(engine: Path, name: str) -> None:
    """Make config.json agree with a file that a test has changed."""
    fields = read_json(engine / "config.json")
    content = (engine / name).read_bytes()
    fields["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    write_json(engine / "config.json", fields)


def _assert_refused(path: Path, *said: str) -> None:
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(path)
    for words in said:
        assert words in str(caught.value)
