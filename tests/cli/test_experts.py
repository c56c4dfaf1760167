"""Targets with experts through the commands: what a build, its plan and `inspect` say of them, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dflash_trt.engine_dir import EngineDir
from tests.checkpoint.expert_files import to_mxfp4
from tests.checkpoint.refusals import remove_keys
from tests.factories import edit_json, make_target, make_zlab_drafter


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny gpt-oss with MXFP4 experts, and a drafter."""
    root = tmp_path_factory.mktemp("gpt_oss")
    target = make_target(root / "target", family="gpt_oss")
    to_mxfp4(target)
    return target, make_zlab_drafter(root / "drafter", target_dir=target, attention_bias=True)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("qwen3_moe") / "target", family="qwen3_moe", mlp_only_layers=[0])


def test_a_build_keeps_mxfp4_experts_as_they_are_and_the_engine_runs(gpt_oss, invoke, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    target, drafter = gpt_oss
    engine = tmp_path / "engine"
    words = ["--target", target, "--drafter", drafter, "-o", engine, "--dtype", "bfloat16", "--max-seq-len", "96"]
    result = invoke("build", *words)
    assert result.exit_code == 0, result.stderr
    stored = load_file(engine / "rank0.safetensors")
    assert stored["target.layers.0.experts.down"].shape == (8, 64, 32)
    assert stored["target.layers.0.experts.down.block_scale"].shape == (8, 64, 2)
    described = invoke("inspect", engine).stdout
    for words_of_a_row in (
        "gpt_oss",
        "8 of 64 features, 3 per token, in 4 of 4 layers",
        "window of 6 tokens",
        "2 of 4 layers",
        "one per head",
    ):
        assert words_of_a_row in described
    target_report = json.loads(invoke("inspect", engine, "--json").stdout)["target"]
    layers = target_report["layers"]
    assert all(layer["feed_forward"]["num_experts_per_token"] == 3 for layer in layers)
    assert all(layer["mixer"]["has_sinks"] is True for layer in layers)
    run = invoke("run", engine, "--prompt", "def f", "--max-new-tokens", "8")
    assert run.exit_code == 0, run.stderr


def test_a_build_says_how_it_reads_what_gpt_oss_leaves_open(gpt_oss, invoke, tmp_path, monkeypatch) -> None:
    """The drafter has the keys of z-lab/gpt-oss-20b-DFlash; the target has no rope_scaling."""
    monkeypatch.setenv("COLUMNS", "200")
    target, drafter = (shutil.copytree(path, tmp_path / path.name) for path in gpt_oss)
    windows = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    remove_keys(drafter / "config.json", *windows, "num_target_layers", "rope_scaling")
    edit_json(drafter / "config.json", model_type="gpt_oss", rope_theta=150000, initial_context_length=4096)
    remove_keys(target / "config.json", "rope_parameters")
    edit_json(target / "config.json", rope_theta=150000, initial_context_length=4096)
    words = ["build", "--target", target, "--drafter", drafter, "--dtype", "float32", "--max-seq-len", "96"]
    result = invoke(*words, "-o", tmp_path / "engine")
    assert result.exit_code == 0, result.stderr
    notes = [
        "target config.json key 'rope_scaling' is absent: YaRN of factor 32, as in transformers",
        "the drafter's config.json has model_type gpt_oss and no rope_scaling: YaRN of factor 32",
        "the drafter's config.json has model_type gpt_oss and no layer_types: full attention in every layer",
    ]
    recorded = json.loads((tmp_path / "engine" / "provenance.json").read_text())["notes"]
    for note in notes:
        assert f"note: {note}" in result.stdout
        assert note in "".join(recorded)
    result = invoke(*words, "-o", tmp_path / "windows", "--drafter-override", "use_sliding_window=true", "--json")
    assert result.exit_code == 0, result.stderr
    draft = json.loads(invoke("inspect", tmp_path / "windows", "--json").stdout)["draft"]
    assert [layer["mixer"]["mask"]["window"] for layer in draft["layers"]] == [128, None]
    found = "".join(json.loads(result.stdout)["notes"])
    assert "'use_sliding_window' is true instead of nothing" in found and "no layer_types" not in found


def expert_bytes(engine: Path) -> tuple[int, int]:
    """Before and after quantization."""
    (row,) = [row for row in EngineDir.open(engine).provenance()["component_bytes"] if row["component"] == "experts"]
    return row["plain_bytes"], row["planned_bytes"]


def test_experts_are_quantized_as_the_target_is(qwen3_moe, invoke, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine = tmp_path / "engine"
    words = ["--target", qwen3_moe, "-o", engine, "--dtype", "float32", "--quantization", "nvfp4_w4a16"]
    result = invoke("build", *words)
    assert result.exit_code == 0, result.stderr
    assert "target.layers.*.experts.down" in result.stderr
    linears = EngineDir.open(engine).manifest.pretrained_config.quantization.linears
    assert {"target.layers.0.gate_up", "target.layers.1.qkv", "target.layers.1.experts.gate_up"} <= set(linears)
    assert not any("router" in name for name in linears)
    num_weights, num_scales = 3 * 8 * 3 * 32 * 64, 3 * 8 * 3
    plain_bytes, planned_bytes = expert_bytes(engine)
    assert plain_bytes == 4 * num_weights
    assert planned_bytes == num_weights // 2 + num_weights // 16 + 4 * num_scales
    assert invoke("run", engine, "--prompt", "def f", "--max-new-tokens", "4").exit_code == 0


def test_experts_keep_the_dtype_where_the_config_says_so(qwen3_moe, invoke, tmp_path) -> None:
    config = tmp_path / "pair.yaml"
    config.write_text(f"target: {qwen3_moe}\ndtype: float32\nquantization: {{target: nvfp4_w4a16, experts: none}}\n")
    result = invoke("build", config, "-o", tmp_path / "engine")
    assert result.exit_code == 0, result.stderr
    plain_bytes, planned_bytes = expert_bytes(tmp_path / "engine")
    assert plain_bytes == planned_bytes


def test_a_format_other_than_the_stored_one_is_refused_by_name(gpt_oss, invoke, tmp_path) -> None:
    config = tmp_path / "pair.yaml"
    config.write_text(f"target: {gpt_oss[0]}\nquantization: {{experts: nvfp4_w4a16}}\n")
    result = invoke("build", config, "-o", tmp_path / "engine")
    assert result.exit_code == 2
    expected = "target.layers.0.experts.gate_up: expected mxfp4, as the checkpoint holds it, found nvfp4_w4a16"
    assert expected in result.stderr
