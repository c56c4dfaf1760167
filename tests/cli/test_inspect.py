import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dflash_trt.cli.inspect import models_table
from dflash_trt.engine_dir import EngineDir
from tests.factories import make_speculators_drafter, make_target, read_json

FULL = {"window": None, "chunk": None, "is_causal": False, "is_window_anchored": False, "first_key": 0}


def test_json_describes_both_models_limits_files_and_provenance(engine_dir, invoke) -> None:
    result = invoke("inspect", engine_dir, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["target"]["family"] == "qwen3"
    assert report["target"]["num_layers"] == 4
    assert [layer["mixer"]["mask"] for layer in report["draft"]["layers"]] == [FULL] * 2
    assert report["draft"]["target_layer_ids"] == [0, 2]
    assert report["draft"]["max_draft_len"] == 3
    assert report["build_config"]["max_seq_len"] == 96
    assert report["has_tokenizer"] is True
    assert all(entry["is_hash_verified"] for entry in report["files"].values())
    assert report["provenance"]["command"][:2] == ["dflash-trt", "build"]


def test_sizes_are_those_of_the_stored_tensors(engine_dir, invoke) -> None:
    report = json.loads(invoke("inspect", engine_dir, "--json").stdout)
    tensors = load_file(engine_dir / "rank0.safetensors")
    for model in ("target", "draft"):
        own = [tensor for name, tensor in tensors.items() if name.startswith(f"{model}.")]
        assert report[model]["num_parameters"] == sum(math.prod(tensor.shape) for tensor in own)
        assert report[model]["weights_bytes"] == sum(tensor.nbytes for tensor in own)
    # K and V, layers, heads, head_dim, float32
    assert report["target"]["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert report["draft"]["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 4


def test_text_says_what_a_person_asks(engine_dir, invoke) -> None:
    result = invoke("inspect", engine_dir)
    assert result.exit_code == 0
    for words in (
        "qwen3",
        "not causal",
        "target layers 0, 2 (0-based)",
        "K = 3 tokens",
        "K/V bytes per token",
        "max_seq_len 96",
        "size and sha256",
        "built by: dflash-trt build",
    ):
        assert words in result.stdout


def test_every_rope_of_a_model_is_named_once(engine_dir, invoke) -> None:
    report = json.loads(invoke("inspect", engine_dir, "--json").stdout)
    report["target"]["layers"][-1]["mixer"]["rope"] |= {"theta": 777.0}
    names, target, drafter = (list(column.cells) for column in models_table(report).columns)
    row = names.index("rope")
    theta = report["target"]["layers"][0]["mixer"]["rope"]["theta"]
    assert target[row] == f"none, theta {theta:g}, none, theta 777"
    assert drafter[row].count("theta") == 1


def test_an_engine_that_has_no_room_here_is_described_and_says_so(engine_dir, invoke, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.backends.page_budget.available_memory_bytes", lambda: 8)
    result = invoke("inspect", engine_dir)
    assert result.exit_code == 0
    assert "K/V on this machine: K/V pages: expected room for one sequence of max_seq_len 96" in result.stdout


def test_a_drafter_of_speculators_is_described_with_its_windows_and_vocabulary(target, tmp_path, invoke) -> None:
    make_speculators_drafter(
        tmp_path / "drafter",
        target_dir=target,
        draft_vocab_size=200,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
    )
    words = ["--target", target, "--drafter", tmp_path / "drafter", "-o", tmp_path / "engine"]
    assert invoke("build", *words).exit_code == 0
    engine = EngineDir.open(tmp_path / "engine")
    result = invoke("inspect", engine.path)
    rows = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in result.stdout.splitlines()]
    assert "vocabulary 272 200" in rows
    assert any(row.startswith("0 ") and row.endswith("6 tokens before the anchor") for row in rows)
    assert any(row.startswith("1 ") and row.endswith(" full") for row in rows)
    assert engine.manifest.draft is not None
    weights = engine.manifest.draft.weights()
    assert any(weight.is_integer for weight in weights.values())
    report = json.loads(invoke("inspect", engine.path, "--json").stdout)
    stored = load_file(engine.path / "rank0.safetensors")
    own = [tensor for name, tensor in stored.items() if name.startswith("draft.")]
    assert report["draft"]["num_parameters"] == sum(tensor.numel() for tensor in own if tensor.is_floating_point())


def test_an_engine_without_a_drafter_is_described(target, tmp_path, invoke) -> None:
    assert invoke("build", "--target", target, "-o", tmp_path / "engine[1]").exit_code == 0
    result = invoke("inspect", tmp_path / "engine[1]")
    assert result.exit_code == 0
    assert "drafter" not in result.stdout
    assert f"engine {tmp_path}/engine[1]: version 3" in result.stdout


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ((), "world_size 1,"),
        (("--tp-size", "2", "--dcp-size", "2"), "world_size 2 (tp_size 2, dcp_size 2),"),
        (("--tp-size", "2", "--ep-size", "2", "--attention-dp"), "world_size 2 (dp_size 2, ep_size 2),"),
    ],
)
def test_what_ranks_divide_is_said(tmp_path: Path, invoke, words: tuple[str, ...], ranks: str) -> None:
    target = make_target(tmp_path / "target", family="deepseek_v3")
    assert invoke("build", "--target", target, "-o", tmp_path / "engine", *words).exit_code == 0
    assert ranks in invoke("inspect", tmp_path / "engine").stdout


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_5_text", "2 x 8, 4 x 12"),
        ("deepseek_v3", "32 + 8 features a token"),
        ("gpt_oss", "2 of 4 layers"),  # with a window; the other two are full
    ],
)
def test_layers_of_other_kinds_are_described(tmp_path, invoke, family, words) -> None:
    target = make_target(tmp_path / "target", family=family)
    assert invoke("build", "--target", target, "-o", tmp_path / "engine").exit_code == 0
    result = invoke("inspect", tmp_path / "engine")
    assert result.exit_code == 0, result.exception
    assert words in result.stdout and "num_heads" in result.stdout
    found = json.loads(invoke("inspect", tmp_path / "engine", "--json").stdout)["target"]["state_bytes_per_request"]
    recurrent_bytes = 3 * 4 * 8 * 12 * 4  # layers, heads of values, sizes of both heads, float32
    assert found > recurrent_bytes if family == "qwen3_5_text" else found == 0


RECORD: dict[str, Any] = {
    "tensorrt_version": "11.0",
    "gpu_name": "a GPU",
    "compute_capability": "9.0",
    "plugin_library": "libdflash_trt_plugins.so",
    "collectives": "native",
    "deterministic": False,
    "flags": ["STRICT", "REFIT"],
    "profiles": [{"name": "decode", "axes": {"rows": [1, 3, 7]}}, {"name": "prefill", "axes": {"rows": [2, 5, 9]}}],
    "num_layers": 17,
    "build_time_s": 2.5,
}


def make_plans(engine: Path, record: dict[str, Any]) -> None:
    """Make an engine of backend tensorrt of one of backend torch; nobody looks into its plan."""
    config, provenance = read_json(engine / "config.json"), read_json(engine / "provenance.json")
    (engine / "rank0.safetensors").rename(engine / "rank0.engine")
    config["files"]["rank0.engine"] = config["files"].pop("rank0.safetensors")
    (engine / record["plugin_library"]).write_bytes(b"")
    config["files"][record["plugin_library"]] = {"sha256": hashlib.sha256(b"").hexdigest(), "size_bytes": 0}
    text = json.dumps(config | {"backend": "tensorrt", "tensorrt": record})
    (engine / "config.json").write_text(text)
    provenance["config_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (engine / "provenance.json").write_text(json.dumps(provenance))


@pytest.mark.parametrize("windows", [[], [8]], ids=["one page group", "page groups"])
def test_plans_are_described_with_the_pages_that_they_have(tmp_path, invoke, windows) -> None:
    """Those of before page groups keep every position of layers with windows."""
    target = make_target(tmp_path / "target", family="gpt_oss", sliding_window=8)
    assert invoke("build", "--target", target, "-o", tmp_path / "engine").exit_code == 0
    make_plans(tmp_path / "engine", RECORD | {"page_windows": windows})
    result = invoke("inspect", tmp_path / "engine")
    assert result.exit_code == 0, result.stderr
    (pages,) = (line for line in result.stdout.splitlines() if line.startswith("K/V on this machine: "))
    assert ("of layers with a window of 8 tokens" in pages) == bool(windows)
    words = "TensorRT 11.0, for a GPU (compute capability 9.0), 17 layers, compiled in 2.5 s; "
    assert f"{words}flags STRICT, REFIT\n" in result.stdout
    cells = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in result.stdout.splitlines()]
    assert "axis decode prefill" in cells and "rows 1 .. 3 .. 7 2 .. 5 .. 9" in cells
    report = json.loads(invoke("inspect", tmp_path / "engine", "--json").stdout)
    assert (report["backend"], report["tensorrt"]) == ("tensorrt", RECORD | {"page_windows": windows})


def test_a_missing_engine_is_one_clear_error(tmp_path, invoke) -> None:
    result = invoke("inspect", tmp_path / "none")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "expected an engine directory, found nothing at that path. Build one:" in result.stderr
