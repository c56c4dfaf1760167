"""MTP heads through the commands: a build, what `inspect` says of it, its run and its plan."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.engine_dir import EngineDir
from tests.mtp_files import make_mtp_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_target(tmp_path_factory.mktemp("mtp") / "target", family="qwen3_5_moe_text")


def test_a_build_with_the_target_s_head_runs_and_says_so(
    target: Path, invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine = tmp_path / "engine"
    words = ["--target", target, "--dtype", "float32", "--max-seq-len", "96", "--json"]
    built = invoke("build", *words, "--drafter", "mtp", "-o", engine)
    assert built.exit_code == 0, built.stderr
    assert not any("drafting layers" in note for note in json.loads(built.stdout)["notes"])
    described = invoke("inspect", engine).stdout
    assert described.count("8 of 32 features, 3 per token") == 2 and "in 1 of 1 layers" in described
    report = json.loads(invoke("inspect", engine, "--json").stdout)["draft"]
    assert (report["algorithm"], report["max_draft_len"]) == ("mtp", 7)
    assert report["kv_bytes_per_token"] == 4 * (2 * 2 * 16 + 64)  # keys and values, and the feature
    texts = []
    for option in ([], ["--no-drafter"], ["--draft-length", "7"]):
        run = invoke("run", engine, "--prompt", "def f", "--max-new-tokens", "16", "--json", *option)
        assert run.exit_code == 0, run.stderr
        texts.append(json.loads(run.stdout)["outputs"][0]["token_ids"])
    assert texts[0] == texts[1] == texts[2]
    plain = invoke("build", *words, "-o", tmp_path / "plain")
    assert any("--drafter mtp drafts with them" in note for note in json.loads(plain.stdout)["notes"])


def test_a_file_may_name_it_and_quantize_its_layers(target: Path, invoke: Callable[..., Any], tmp_path: Path) -> None:
    config = tmp_path / "pair.yaml"
    config.write_text(
        f"target: {target}\ndrafter: mtp\ndtype: float32\nmax_seq_len: 96\nquantization: {{target: fp8_w8a16}}\n"
    )
    built = invoke("build", config, "-o", tmp_path / "engine")
    assert built.exit_code == 0, built.stderr
    linears = EngineDir.open(tmp_path / "engine").manifest.pretrained_config.quantization.linears
    assert {"draft.kv", "draft.layers.0.q", "draft.layers.0.experts.down", "target.layers.2.qkv"} <= set(linears)
    assert invoke("run", tmp_path / "engine", "--prompt", "def f", "--max-new-tokens", "4").exit_code == 0
    planned = invoke("plan", config, "--gpu", "h200", "--json")
    assert planned.exit_code == 0, planned.stderr


def test_tensorrt_llm_refuses_it_by_name(target: Path, invoke: Callable[..., Any], tmp_path: Path) -> None:
    words = ["--target", target, "--drafter", "mtp", "--backend", "tensorrt_llm", "--max-seq-len", "96"]
    built = invoke("build", *words, "-o", tmp_path / "engine")
    assert built.exit_code != 0 and "drafter algorithm: expected dflash" in built.stderr
