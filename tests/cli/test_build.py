import errno
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.cli.build import _progress_shown
from dflash_trt.compile.build import BuildProgress, build_engine
from tests.cli.calls import Recorder
from tests.cli.test_status_line import Terminal
from tests.factories import edit_json, make_target, make_zlab_drafter, read_json, write_json


@pytest.fixture
def config_file(tmp_path: Path, target: Path, drafter: Path) -> Path:
    """In a directory of its own, with paths relative to it."""
    path = tmp_path / "configs" / "pair.yaml"
    path.parent.mkdir()
    lines = [f"{role}: {os.path.relpath(checkpoint, path.parent)}" for role, checkpoint in _roles(target, drafter)]
    path.write_text("\n".join([*lines, "dtype: float32", "max_batch_size: 4", ""]))
    return path


def _roles(target: Path, drafter: Path) -> list[tuple[str, Path]]:
    return [("target", target), ("drafter", drafter)]


def test_yaml_paths_are_relative_to_the_yaml_file(config_file, tmp_path, invoke, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("build", config_file, "-o", "new/engine", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["build_config"] == {
        "max_batch_size": 4,
        "max_seq_len": 512,
        "max_num_tokens": 2048,
        "max_draft_len": 3,
        "page_size": 32,
    }
    files = [path for path in (tmp_path / "new/engine").rglob("*") if path.is_file()]
    assert summary["total_size_bytes"] == sum(path.stat().st_size for path in files)
    assert len(summary["file_size_bytes"]) == len(files)


def test_flags_override_yaml_keys(config_file, tmp_path, invoke) -> None:
    flags = ["--dtype", "bfloat16", "--max-batch-size", "2", "--max-seq-len", "64", "--max-draft-len", "1"]
    result = invoke("build", config_file, "-o", tmp_path / "engine", *flags, "--max-num-tokens", "16", "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["dtype"] == "bfloat16"
    assert summary["build_config"] == {
        "max_batch_size": 2,
        "max_seq_len": 64,
        "max_num_tokens": 16,
        "max_draft_len": 1,
        "page_size": 32,
    }
    tensors = load_file(tmp_path / "engine/rank0.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_flags_beside_a_yaml_file_may_be_a_name_on_the_hub_or_none(config_file, invoke, monkeypatch) -> None:
    builder = Recorder(build_engine)
    monkeypatch.setattr("dflash_trt.compile.build.build_engine", builder)
    with config_file.open("a") as stream:
        stream.write("chat_template_options: {thinks: true, depth: 1}\n")
    words = ["--target", "Qwen/Qwen3-8B", "--drafter", "none", "--chat-template-option", "depth=2"]
    assert invoke("build", config_file, "-o", "engine", *words).stderr == "error: recorded\n"
    config = builder.arguments["config"]
    assert (config.target, config.drafter, config.max_batch_size) == ("Qwen/Qwen3-8B", None, 4)
    assert config.chat_template_options == {"thinks": True, "depth": 2}


def test_a_leftover_of_a_killed_build_is_named_before_it_is_removed(target, tmp_path, invoke) -> None:
    left = tmp_path / ".engine.tmp-00000000"
    left.mkdir()
    result = invoke("build", "--target", target, "-o", tmp_path / "engine")
    assert f"removed {left}, left by a killed build" in result.stderr and not left.exists()


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (BuildProgress(stage="writing weights", done_bytes=250, total_bytes=900), ("writing weights ", "250/900")),
        (BuildProgress(stage="verifying", done_prompts=3, total_prompts=4), ("verifying (prompts)", "3/4")),
        (BuildProgress(stage="compiling", done_steps=7, total_steps=9), ("compiling ", "7/9")),
    ],
)
def test_a_bar_on_a_terminal_shows_how_far_a_stage_is(progress, words) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), _progress_shown() as show:
        show(BuildProgress(stage="downloading"))
        show(progress)
    assert all(word in terminal.getvalue() for word in words)


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        ({"done_bytes": 2_000_000_000, "total_bytes": 8_000_000_000}, "2.0 of 8.0 GB, about 30 s left"),
        ({"done_prompts": 2, "total_prompts": 8}, "2 of 8 prompts, about 30 s left"),
        ({"done_steps": 2, "total_steps": 8}, "2 of 8 steps, about 30 s left"),
    ],
)
def test_a_pipe_is_told_how_far_a_stage_is(progress, line, monkeypatch, capsys) -> None:
    now_s = [0.0]
    monkeypatch.setattr("dflash_trt.cli.time_left.time.monotonic", lambda: now_s[0])
    with _progress_shown() as show:
        show(BuildProgress(stage="verifying"))
        now_s[0] = 10.0
        show(BuildProgress(stage="verifying", **progress))
    assert capsys.readouterr().err.splitlines() == ["verifying ...", f"verifying: {line}"]


def test_keys_of_the_drafter_s_config_are_overridden_and_noted(config_file, tmp_path, invoke) -> None:
    with config_file.open("a") as stream:
        stream.write("drafter_overrides: {is_causal: false, rope_theta: 7000.0}\n")
    flags = ["--drafter-override", "is_causal=true", "--drafter-override", "dflash_config.mask_token_id=2"]
    result = invoke("build", config_file, "-o", tmp_path / "engine", *flags)
    assert result.exit_code == 0, result.stderr
    overrides = {"is_causal": True, "rope_theta": 7000.0, "dflash_config.mask_token_id": 2}
    for name in overrides:
        assert f"note: drafter config.json key '{name}' is " in result.stdout
    assert read_json(tmp_path / "engine/provenance.json")["config"]["drafter_overrides"] == overrides
    draft = read_json(tmp_path / "engine/config.json")["pretrained_config"]["draft"]
    assert [layer["mixer"]["mask"]["is_causal"] for layer in draft["layers"]] == [True, True]
    assert {layer["mixer"]["rope"]["theta"] for layer in draft["layers"]} == {7000.0} and draft["mask_token_id"] == 2
    assert "as drafter_overrides says" in invoke("inspect", tmp_path / "engine").stdout


@pytest.mark.parametrize("word", ["is_causal", "is_causal=yes", "model_type=qwen3"])
def test_an_override_that_is_no_json_is_a_usage_error(config_file, tmp_path, invoke, word) -> None:
    result = invoke("build", config_file, "-o", tmp_path / "engine", "--drafter-override", word)
    _assert_refused(result, 2, "--drafter-override: expected KEY=JSON")


def test_overrides_without_a_drafter_are_refused(target, tmp_path, invoke) -> None:
    flags = ["--target", target, "--drafter-override", "is_causal=true"]
    _assert_refused(invoke("build", "-o", tmp_path / "engine", *flags), 2, "drafter_overrides need a drafter")


def test_the_summary_lists_every_file_and_progress_goes_to_stderr(config_file, tmp_path, invoke) -> None:
    result = invoke("build", config_file, "-o", tmp_path / "engine")
    assert result.exit_code == 0, result.stderr
    for name in ("rank0.safetensors", "tokenizer/tokenizer.json", "provenance.json", "max_draft_len 3"):
        assert name in result.stdout
    assert result.stderr.splitlines() == ["checking ...", "hashing inputs ...", "writing weights ...", "verifying ..."]


def test_the_command_line_stands_in_provenance_and_in_errors_about_the_engine(config_file, tmp_path, invoke) -> None:
    words = ["build", str(config_file), "-o", str(tmp_path / "engine")]
    assert invoke(*words).exit_code == 0
    assert read_json(tmp_path / "engine/provenance.json")["command"] == ["dflash-trt", *words]
    (tmp_path / "engine/rank0.safetensors").unlink()
    result = invoke("inspect", tmp_path / "engine")
    assert result.exit_code == 1
    assert f"dflash-trt {' '.join(words)} --overwrite" in result.stderr


def test_an_engine_is_replaced_only_when_told(config_file, tmp_path, invoke) -> None:
    output = tmp_path / "engine"
    assert invoke("build", config_file, "-o", output).exit_code == 0
    before = (output / "config.json").read_bytes()
    refused = invoke("build", config_file, "-o", output, "--max-seq-len", "64")
    assert refused.exit_code == 1
    assert "Pass --overwrite." in refused.stderr
    assert (output / "config.json").read_bytes() == before
    assert invoke("build", config_file, "-o", output, "--max-seq-len", "64", "--overwrite").exit_code == 0
    assert read_json(output / "config.json")["build_config"]["max_seq_len"] == 64
    assert _names(tmp_path) == {"configs", "engine"}


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
def test_a_directory_that_is_no_engine_is_never_replaced(config_file, tmp_path, invoke, flags) -> None:
    output = tmp_path / "home"
    output.mkdir()
    (output / "thesis.tex").write_text("years of work")
    (output / "config.json").write_text('{"version": 3, "backend": "torch"}')  # of another program
    result = invoke("build", config_file, "-o", output, *flags)
    assert result.exit_code == 1
    assert "not an engine" in result.stderr
    assert (output / "thesis.tex").read_text() == "years of work"


# Bad input: one clear error, the exit code, nothing left behind.


def test_a_missing_yaml_file_is_a_usage_error(tmp_path, invoke) -> None:
    _assert_refused(invoke("build", tmp_path / "none.yaml", "-o", tmp_path / "engine"), 2, "none.yaml", "YAML file")
    assert _names(tmp_path) == set()


def test_no_configuration_at_all_is_a_usage_error(tmp_path, invoke) -> None:
    _assert_refused(invoke("build", "-o", tmp_path / "engine"), 2, "Pass CONFIG.yaml, a recipe's name, or --target")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("target: t\nmax_seq_length: 5\n", ["max_seq_length", "Did you mean 'max_seq_len'?"]),
        ("target: t\ntarget: u\n", ["'target' stands twice"]),
        ("target: [\n", ["valid YAML"]),
        ("- a\n- b\n", ["a mapping"]),
        ("", ["found nothing"]),
        ("drafter: d\n", ["key 'target'"]),
        ("target: t\ndtype: int3\n", ["key 'dtype'", "'int3'"]),
        ("target: t\nmax_batch_size: 0\nmax_seq_len: 1\n", ["2 problems", "max_batch_size", "max_seq_len"]),
        ("target: \xff".encode("latin-1"), ["valid YAML", "utf-8"]),
        ("target: 2001-99-99\n", ["valid YAML", "month must be in 1..12"]),
        ("max_seq_len: " + "9" * 5000, ["valid YAML", "integer string conversion"]),
        ("target: t\nmax_batch_size: " + "9" * 4000, ["key 'max_batch_size'", "less than or equal to 2147483647"]),
        ("target: t\nmax_num_tokens: 2147483648\n", ["key 'max_num_tokens'"]),
        ("target: &t a\ndrafter: *t\n", ["valid YAML", "an alias, *t: write the value out"]),
        ("[" * 10_000, ["valid YAML"]),
        ("x: " + "y" * 300_000, ["valid YAML", "more than 262144"]),
        ("? [a]\n: 1\n", ["valid YAML", "unhashable key"]),
    ],
)
def test_a_wrong_yaml_file_is_a_usage_error_that_names_the_key(tmp_path, invoke, text, said) -> None:
    config = tmp_path / "pair.yaml"
    config.write_bytes(text if isinstance(text, bytes) else text.encode())
    _assert_refused(invoke("build", config, "-o", tmp_path / "engine"), 2, *said)
    assert _names(tmp_path) == {"pair.yaml"}


def test_a_bomb_of_aliases_is_refused_at_once(tmp_path, invoke) -> None:
    """Ten levels of ten aliases each, which an error message would spell out."""
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    (tmp_path / "bomb.yaml").write_text("\n".join(["l0: &l0 [x, x]", *levels, "target: *l9", ""]))
    started_s = time.monotonic()
    _assert_refused(invoke("build", tmp_path / "bomb.yaml", "-o", tmp_path / "engine"), 2, "an alias, *l0")
    assert time.monotonic() - started_s < 5


def test_keys_that_stand_twice_are_found_in_linear_time(tmp_path, invoke) -> None:
    (tmp_path / "long.yaml").write_text("".join(f"k{i}: 0\n" for i in range(20_000)) + "k0: 0\n")
    started_s = time.monotonic()
    _assert_refused(invoke("build", tmp_path / "long.yaml", "-o", tmp_path / "engine"), 2, "'k0' stands twice")
    assert time.monotonic() - started_s < 20


def test_a_missing_checkpoint_is_refused_by_its_path(target, tmp_path, invoke) -> None:
    words = ["build", "--target", target, "--drafter", tmp_path / "nowhere", "-o", tmp_path / "deep/er/engine"]
    _assert_refused(invoke(*words), 2, str(tmp_path / "nowhere"), "a checkpoint directory")
    assert _names(tmp_path) == set()


def test_a_truncated_safetensors_file_is_refused(target, drafter, tmp_path, invoke) -> None:
    broken = shutil.copytree(drafter, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = invoke("build", "--target", target, "--drafter", broken, "-o", tmp_path / "engine")
    _assert_refused(result, 1, "model.safetensors")
    assert _names(tmp_path) == {"broken"}


def test_a_drafter_of_another_target_is_refused(drafter, tmp_path, invoke) -> None:
    other = make_target(tmp_path / "other", hidden_size=32)
    result = invoke("build", "--target", other, "--drafter", drafter, "-o", tmp_path / "engine")
    _assert_refused(result, 2, "hidden_size", "64", "32")
    assert _names(tmp_path) == {"other"}


def test_a_drafter_with_another_tokenizer_is_refused(target, tmp_path, invoke) -> None:
    drafter = make_zlab_drafter(tmp_path / "drafter", target_dir=target)
    tokenizer = read_json(target / "tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    write_json(drafter / "tokenizer.json", tokenizer)
    result = invoke("build", "--target", target, "--drafter", drafter, "-o", tmp_path / "engine")
    _assert_refused(result, 1, "tokenizer")
    assert _names(tmp_path) == {"drafter"}


def test_a_limit_beyond_the_checkpoints_is_a_usage_error(target, drafter, tmp_path, invoke) -> None:
    words = ["build", "--target", target, "--drafter", drafter, "-o", tmp_path / "engine"]
    result = invoke(*words, "--max-seq-len", "4096", "--max-draft-len", "9")
    _assert_refused(result, 2, "2 problems", "max_seq_len: expected at most 512", "max_draft_len: expected at most 3")
    assert _names(tmp_path) == set()


def test_a_disk_that_is_too_full_is_refused_before_the_first_byte(target, tmp_path, invoke, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 5))
    result = invoke("build", "--target", target, "-o", tmp_path / "deep/engine")
    _assert_refused(result, 1, "bytes of free disk space", "found 5 bytes", "Free some space")
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_while_building_leaves_nothing(target, tmp_path, invoke, monkeypatch, number) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    result = invoke("build", "--target", target, "-o", tmp_path / "deep/engine")
    _assert_refused(result, 1, str(tmp_path / "deep/engine"), os.strerror(number))
    assert ("bytes of free disk space" in result.stderr) == (number != errno.EIO)
    assert _names(tmp_path) == set()


def test_a_write_that_fails_half_way_leaves_nothing_and_keeps_the_old_engine(target, tmp_path) -> None:
    """The kernel itself refuses to let a file grow beyond 100 kB."""
    code = (
        "import resource, sys; from dflash_trt.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2); main()"
    )
    output = tmp_path / "deep/engine"
    build = ["build", "--target", str(target), "-o", str(output), "--overwrite"]
    command = [sys.executable, "-c", code]
    failed = subprocess.run([*command, "100000", *build], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "bytes of free disk space" in failed.stderr
    assert "File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert _names(tmp_path) == set()
    subprocess.run([*command, "100000000", *build], capture_output=True, check=True)
    before = (output / "config.json").read_bytes()
    failed = subprocess.run([*command, "100000", *build], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert (output / "config.json").read_bytes() == before
    assert _names(output.parent) == {"engine"}


def test_a_weight_that_is_not_finite_stops_the_build(target, tmp_path, invoke) -> None:
    broken = shutil.copytree(target, tmp_path / "broken")
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # a NaN, in float32
    (broken / "model.safetensors").write_bytes(content)
    result = invoke("build", "--target", broken, "-o", tmp_path / "engine")
    _assert_refused(result, 1, "finite")
    assert _names(tmp_path) == {"broken"}


def test_a_config_of_another_architecture_is_refused(target, tmp_path, invoke) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    edit_json(other / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    _assert_refused(invoke("build", "--target", other, "-o", tmp_path / "engine"), 2, "MambaForCausalLM")


def _assert_refused(result, exit_code: int, *said: str) -> None:
    assert result.exit_code == exit_code, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    for words in said:
        assert words in result.stderr
    assert "Traceback" not in result.stderr


def _names(path: Path) -> set[str]:
    """What stands in a directory, hidden files too."""
    return {entry.name for entry in path.iterdir()}
