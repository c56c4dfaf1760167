import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.core.errors import EngineDirError
from dflash_trt.engine_dir import EngineDir
from dflash_trt.engine_dir import opening as opening_module
from tests.engine_dir.building import COMMAND, build
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


def test_the_command_that_mends_a_directory_is_said_once_for_where_it_is_now(built: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(built, tmp_path / "elsewhere")
    shutil.rmtree(moved / "tokenizer")
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(moved)
    *missing, remedy = str(caught.value).splitlines()[1:]
    assert len(missing) > 1 and {line.split(": ")[1] for line in missing} == {"expected a file, found none."}
    assert remedy == f"Build it again: dflash-trt build pair.yaml -o {moved} --overwrite"


def test_the_command_that_mends_a_directory_is_the_one_that_made_it_and_where_it_ran(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remedy(path: Path) -> str:
        with pytest.raises(EngineDirError) as caught:
            EngineDir.open(path)
        return str(caught.value).splitlines()[-1]

    shutil.rmtree(engine / "tokenizer")
    command = ["dflash-trt", "build", "pair.yaml", "--overwrite", "--output", "engine"]
    edit_json(engine / "provenance.json", command=command, working_dir=str(tmp_path))
    assert remedy(engine) == f"Build it again in {tmp_path}: {' '.join(command)}"
    monkeypatch.chdir(tmp_path)
    assert remedy(engine) == f"Build it again: {' '.join(command)}"
    moved = engine.rename(tmp_path / "moved")
    assert remedy(moved) == f"Build it again: {' '.join(command[:-1])} {moved}"
    edit_json(moved / "provenance.json", command=3)
    assert remedy(moved) == f"Build it again: dflash-trt build CONFIG.yaml -o {moved} --overwrite"


def test_the_bytes_that_readers_report_are_counted_up_to_the_size_of_the_weights(built: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = EngineDir.open(built).reporting(lambda *counts: seen.append(counts))
    num_bytes = (built / "rank0.safetensors").stat().st_size
    for num_more in (10, 20, num_bytes):
        engine.on_read(num_more)
    assert seen == [(count, num_bytes) for count in (0, 10, 30, num_bytes)]


def test_a_copy_of_an_engine_may_have_a_drafter_that_sees_less(built: Path, checkpoints: Path, tmp_path: Path) -> None:
    engine = EngineDir.open(built)
    assert engine.with_draft_window(None) is engine
    narrowed = engine.with_draft_window(7).manifest.draft
    assert narrowed is not None and engine.manifest.draft is not None
    assert [layer.mixer.mask.window for layer in narrowed.layers] == [7, 7]
    assert [layer.mixer.mask.window for layer in engine.manifest.draft.layers] == [None, None]
    alone = build(checkpoints, tmp_path / "alone")
    assert alone.with_draft_window(7) is alone


def test_the_weights_of_every_rank_are_looked_at(checkpoints: Path, tmp_path: Path) -> None:
    engine = build(checkpoints, tmp_path / "engine", tp_size=2).path
    tensors = load_file(engine / "rank1.safetensors")
    del tensors["target.norm"]
    save_file(tensors, engine / "rank1.safetensors")
    _relist(engine, "rank1.safetensors")
    _assert_refused(engine, "rank1.safetensors tensor 'target.norm': expected F32 [64], found no such tensor")


def test_an_engine_from_before_chat_templates_had_options_opens_without_any(engine: Path) -> None:
    fields = read_json(engine / "config.json")
    del fields["chat_template_options"]
    write_json(engine / "config.json", fields)
    edit_json(
        engine / "provenance.json", config_sha256=hashlib.sha256((engine / "config.json").read_bytes()).hexdigest()
    )
    assert EngineDir.open(engine).manifest.chat_template_options == {}


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
    edit_json(engine / "config.json", version=1, nonsense=True)
    _assert_refused(
        engine, "expected engine version 3, found version 1", f"dflash-trt build pair.yaml -o {engine} --overwrite"
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
        "'pretrained_config.target.is_moe' is unknown",
        "'build_config.max_beam_width' is unknown",
        "'pretrained_config.dtype' is missing",
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


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tools.jinja"])
def test_a_file_put_among_the_tokenizer_files_is_refused(engine: Path, name: str) -> None:
    (engine / "tokenizer" / name).parent.mkdir(exist_ok=True)
    (engine / "tokenizer" / name).write_text("{{ messages }}")
    _assert_refused(engine, f"tokenizer/{name} is not listed in config.json")


def test_large_files_are_hashed_only_when_asked(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = engine / "rank0.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for limit in (2**28, len(content) + 1):
        monkeypatch.setattr(opening_module, "MAX_ALWAYS_HASHED_BYTES", limit)
        _assert_refused(engine, "rank0.safetensors: expected sha256")
    monkeypatch.setattr(opening_module, "MAX_ALWAYS_HASHED_BYTES", len(content))
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


@pytest.mark.parametrize("verify_hashes", [False, True])
def test_a_changed_config_is_seen_by_the_hash_in_provenance(engine: Path, verify_hashes: bool) -> None:
    fields = read_json(engine / "config.json")
    fields["pretrained_config"]["target"]["rms_norm_eps"] = 1e-5  # a value that models have
    write_json(engine / "config.json", fields)
    with pytest.raises(EngineDirError, match=r"config\.json: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        EngineDir.open(engine, verify_hashes=verify_hashes)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("target.rms_norm_eps", 1e30, "rms_norm_eps': expected less than or equal to 0.1, found 1e+30"),
        ("target.rms_norm_eps", float("nan"), "rms_norm_eps': expected a finite number, found nan"),
        ("target.layers.0.mixer.rope.theta", float("inf"), "rope.theta': expected a finite number, found inf"),
        ("target.layers.0.mixer.rope.theta", 1.0, "rope.theta': expected greater than or equal to 2"),
        ("target.layers.0.mixer.num_heads", 0, "num_heads': expected greater than or equal to 1"),
        ("target.layers.0.mixer.head_dim", 15, "head_dim': expected a multiple of 2"),
        (
            "target.layers.0.mixer.mask",
            {"window": -4, "is_causal": True},
            "window': expected greater than or equal to 1",
        ),
        ("target.eos_token_ids", [272], "eos_token_ids': expected ids below vocab_size 272"),
        ("draft.mask_token_id", 272, "mask_token_id': expected an id below the target's vocab_size 272, found 272"),
        ("draft.target_layer_ids", [0, 4], "target_layer_ids below the target's 4 layers (not [4])"),
        ("draft.draft_block_size", 2**31 - 1, "draft_block_size': expected less than or equal to 1024"),
        ("mapping", {"world_size": 2**20, "tp_size": 2**20, "pp_size": 1, "rank": 0}, "world_size': expected less"),
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    engine: Path, where: str, value: object, said: str
) -> None:
    """Even with the hash that fits: who edits a file can edit two."""
    fields = read_json(engine / "config.json")
    *sections, key = where.split(".")
    section = fields["pretrained_config"]
    for name in sections:
        section = section[int(name) if name.isdigit() else name]
    section[key] = value
    write_json(engine / "config.json", fields)
    _rehash(engine)
    _assert_refused(engine, said)


def test_a_sequence_longer_than_the_models_positions_is_refused(engine: Path) -> None:
    fields = read_json(engine / "config.json")
    fields["build_config"]["max_seq_len"] = 513
    write_json(engine / "config.json", fields)
    _assert_refused(engine, "max_seq_len of at most 512")


def test_a_key_that_stands_twice_is_refused(engine: Path) -> None:
    text = (engine / "config.json").read_text()
    (engine / "config.json").write_text(text.replace('"hidden_size"', '"hidden_size": 64, "hidden_size"', 1))
    _assert_refused(engine, "key 'hidden_size' 2 times in one object")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "provenance.json: expected a JSON object"),
        ("{}", "provenance.json key 'config_sha256' is missing"),
        ('{"config_sha256": 3, "extra": 1}', "provenance.json key 'config_sha256': expected"),
    ],
)
def test_a_provenance_that_is_not_one_is_refused(engine: Path, content: str, said: str) -> None:
    (engine / "provenance.json").write_text(content)
    _assert_refused(engine, said)


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "rank0.safetensors", "provenance.json", "config.json"])
def test_a_link_in_place_of_a_file_is_refused(engine: Path, name: str) -> None:
    elsewhere = engine.parent / "elsewhere"
    (engine / name).rename(elsewhere)
    (engine / name).symlink_to(elsewhere)
    _assert_refused(engine, f"{name}: expected a file of this directory, found a symbolic link to {elsewhere}")


def test_a_link_to_another_tokenizer_directory_is_refused(engine: Path) -> None:
    (engine / "tokenizer").rename(engine.parent / "elsewhere")
    (engine / "tokenizer").symlink_to(engine.parent / "elsewhere")
    _assert_refused(engine, "tokenizer/tokenizer.json: expected a file of this directory, found a symbolic link")


@pytest.mark.parametrize("kind", ["link to a file", "link to a directory", "broken link", "pipe"])
def test_nothing_is_smuggled_in_among_the_tokenizer_files(engine: Path, checkpoints: Path, kind: str) -> None:
    extra = engine / "tokenizer/additional_chat_templates"
    if kind == "pipe":
        os.mkfifo(extra)
    else:
        targets = {"link to a file": "target/config.json", "link to a directory": "target", "broken link": "nothing"}
        extra.symlink_to(checkpoints / targets[kind])
    _assert_refused(engine, "tokenizer/additional_chat_templates is not listed in config.json")


def test_an_engine_behind_a_link_opens(built: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(built)
    EngineDir.open(tmp_path / "link")


def _relist(engine: Path, name: str) -> None:
    """Make config.json agree with a file that a test has changed."""
    fields = read_json(engine / "config.json")
    content = (engine / name).read_bytes()
    fields["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
    write_json(engine / "config.json", fields)
    _rehash(engine)


def _rehash(engine: Path) -> None:
    """Make provenance.json agree with a config.json that a test has changed."""
    sha256 = hashlib.sha256((engine / "config.json").read_bytes()).hexdigest()
    edit_json(engine / "provenance.json", config_sha256=sha256)


def _assert_refused(path: Path, *said: str) -> None:
    with pytest.raises(EngineDirError) as caught:
        EngineDir.open(path)
    for words in said:
        assert words in str(caught.value)
