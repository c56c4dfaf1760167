"""`dflash-trt eval` and the quantization half of `dflash-trt build`, as a user meets them."""

import json
from pathlib import Path

import pytest

from dflash_trt.core.packed_spec import engine_table
from dflash_trt.engine_dir import EngineDir
from tests.factories import make_target

PROMPT_TOKENS = [[5, 6, 7, 8, 9, 10, 11], [100, 90, 80, 70], [33, 44]]


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": tokens}) + "\n" for tokens in PROMPT_TOKENS))
    return path


@pytest.fixture
def weight_only(target: Path, drafter: Path, tmp_path: Path, invoke) -> Path:
    """Needs no calibration, so no ModelOpt."""
    output = tmp_path / "weight-only"
    words = ["build", "--target", target, "--drafter", drafter, "-o", output, "--dtype", "float32"]
    result = invoke(*words, "--max-seq-len", "96", "--quantization", "nvfp4_w4a16")
    assert result.exit_code == 0, result.stderr
    assert "quantization plan" in result.stderr and "target.layers.*.qkv" in result.stderr
    assert "0.141" in result.stdout  # 4.5 of 32 bits, and a few scales
    return output


def evaluated(invoke, *words: object) -> tuple[int, dict]:
    result = invoke("eval", *words, "--max-new-tokens", "8", "--json")
    return result.exit_code, json.loads(result.stdout)


def test_an_engine_against_itself_loses_nothing(engine_dir, prompts_file, invoke) -> None:
    gates = ["--max-kl", "0", "--min-acceptance-ratio", "1", "--min-agreement", "1"]
    exit_code, report = evaluated(invoke, engine_dir, "--against", engine_dir, "--prompts", prompts_file, *gates)
    assert exit_code == 0
    assert (report["kl_nats"], report["token_agreement_fraction"], report["acceptance_ratio"]) == (0.0, 1.0, 1.0)
    assert report["num_prompts"] == 3
    assert report["num_prompt_positions"] == sum(len(tokens) - 1 for tokens in PROMPT_TOKENS)
    assert report["num_generated_positions"] == 24
    assert report["baseline_perplexity"] == report["candidate_perplexity"] > 1


def test_a_gate_that_fails_is_the_exit_code(engine_dir, weight_only, prompts_file, invoke) -> None:
    words = [weight_only, "--against", engine_dir, "--prompts", prompts_file]
    exit_code, report = evaluated(invoke, *words)
    assert exit_code == 0 and report["gates"] == []
    assert report["kl_nats"] > 0.001
    bound = report["kl_nats"] / 2
    exit_code, report = evaluated(invoke, *words, "--max-kl", str(bound), "--min-agreement", "0")
    assert exit_code == 1
    assert [gate["has_passed"] for gate in report["gates"]] == [False, True]
    exit_code, _ = evaluated(invoke, *words, "--max-kl", str(3 * bound))
    assert exit_code == 0


def test_the_table_says_the_sample_sizes(engine_dir, prompts_file, invoke) -> None:
    words = ["eval", engine_dir, "--against", engine_dir, "--prompts", prompts_file, "--max-new-tokens", "8"]
    result = invoke(*words, "--max-kl", "0.1")
    assert result.exit_code == 0, result.stderr
    for part in (
        "24 generated positions",
        "10 prompt positions",
        "verify steps",
        "gate max_kl (at most 0.1): 0 passed",
    ):
        assert part in result.stdout


def test_engines_of_different_pairs_are_not_compared(engine_dir, prompts_file, tmp_path, invoke) -> None:
    other = make_target(tmp_path / "other", num_hidden_layers=2)
    built = invoke("build", "--target", other, "-o", tmp_path / "engine", "--dtype", "float32")
    assert built.exit_code == 0, built.stderr
    result = invoke("eval", tmp_path / "engine", "--against", engine_dir, "--prompts", prompts_file)
    assert result.exit_code == 2
    assert "expected the same in both" in result.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "expected at least one prompt"),
        ('{"prompt_token_ids": [5]}\n{"prompt_token_ids": [5], "x": 1}\n', "2: input row: field 'x'"),
    ],
)
def test_wrong_prompts_are_refused(engine_dir, tmp_path, invoke, content: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    result = invoke("eval", engine_dir, "--against", engine_dir, "--prompts", path)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_manifest_says_what_is_packed(weight_only) -> None:
    config = EngineDir.open(weight_only).manifest.pretrained_config
    assert config.quantization is not None
    assert set(config.quantization.linears.values()) == {"nvfp4_w4a16"}
    assert set(config.quantization.linears) < set(engine_table(config.target, config.draft, config.quantization))


def test_inspect_shows_the_formats(weight_only, invoke) -> None:
    result = invoke("inspect", weight_only, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["quantization"]["linears"]["draft.fc"] == "nvfp4_w4a16"


def test_a_flag_overrides_the_format_of_the_yaml_and_keeps_its_other_keys(target, drafter, tmp_path, invoke) -> None:
    path = tmp_path / "pair.yaml"
    lines = [f"target: {target}", f"drafter: {drafter}", "dtype: float32", "quantization:", "  target: fp8"]
    path.write_text("\n".join([*lines, "  overrides:", "    draft.fc: none", ""]))
    result = invoke("build", path, "-o", tmp_path / "engine", "--quantization", "nvfp4_w4a16", "--json")
    assert result.exit_code == 0, result.stderr
    linears = json.loads(result.stdout)["quantization"]["linears"]
    assert linears["target.layers.0.qkv"] == "nvfp4_w4a16" and "draft.fc" not in linears


def test_an_unknown_format_is_a_usage_error(target, tmp_path, invoke) -> None:
    result = invoke("build", "--target", target, "-o", tmp_path / "engine", "--quantization", "int4")
    assert result.exit_code == 2
    assert "key 'quantization.target'" in result.stderr and "'nvfp4_w4a16'" in result.stderr
