"""`dflash-trt eval` and the quantization half of `dflash-trt build`, as a user meets them."""

import csv
import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_trt.bench.comparison import Acceptance, ComparedText, Comparison
from dflash_trt.cli.eval import _logits_of
from dflash_trt.core.model.draft import engine_weights
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.serving.generation_batch import output_without_tokens
from dflash_trt.serving.tensorrt_llm.engine import URL
from tests.distinct import Distinct
from tests.factories import make_target
from tests.serving.trtllm_server import trtllm_server
from tests.serving.trtllm_stand_in.tensorrt_llm import Model

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
    exit_code, report = evaluated(invoke, engine_dir, "--against", engine_dir, "--input-file", prompts_file, *gates)
    assert exit_code == 0
    assert (report["kl_nats"], report["token_agreement_fraction"], report["acceptance_ratio"]) == (0.0, 1.0, 1.0)
    assert report["num_prompts"] == 3
    assert report["num_prompt_positions"] == sum(len(tokens) - 1 for tokens in PROMPT_TOKENS)
    assert report["num_generated_positions"] == 24
    assert report["baseline_perplexity"] == report["candidate_perplexity"] > 1


def test_a_gate_that_fails_is_the_exit_code(engine_dir, weight_only, prompts_file, invoke) -> None:
    words = [weight_only, "--against", engine_dir, "--input-file", prompts_file]
    exit_code, report = evaluated(invoke, *words)
    assert exit_code == 0 and report["gates"] == []
    assert report["kl_nats"] > 0.001
    bound = report["kl_nats"] / 2
    exit_code, report = evaluated(invoke, *words, "--max-kl", str(bound), "--min-agreement", "0")
    assert exit_code == 3
    assert [gate["has_passed"] for gate in report["gates"]] == [False, True]
    exit_code, _ = evaluated(invoke, *words, "--max-kl", str(3 * bound))
    assert exit_code == 0


def test_the_table_says_the_sample_sizes(engine_dir, prompts_file, invoke) -> None:
    words = ["eval", engine_dir, "--against", engine_dir, "--input-file", prompts_file, "--max-new-tokens", "8"]
    result = invoke(*words, "--max-kl", "0.1")
    assert result.exit_code == 0, result.stderr
    for part in (
        "24 generated positions",
        "10 prompt positions",
        "verify steps",
        "gate max_kl (at most 0.1): 0 passed",
    ):
        assert part in result.stdout


def test_a_table_and_a_figure_are_written(engine_dir, weight_only, tmp_path, invoke) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": ids, "id": f"r{i}", "category": "c"} for i, ids in enumerate(PROMPT_TOKENS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--csv", tmp_path / "rows.csv", "--figure", tmp_path / "loss.svg"]
    exit_code, report = evaluated(invoke, weight_only, "--against", engine_dir, "--input-file", prompts, *files)
    assert exit_code == 0 and [row["id"] for row in report["reports"]] == ["r0", "r1", "r2"]
    with (tmp_path / "rows.csv").open() as stream:
        table = list(csv.DictReader(stream))
    for row, written in zip(report["reports"], table, strict=True):
        assert {name: str(value) for name, value in row.items() if value is not None} == {
            name: value for name, value in written.items() if value
        }
    mean = sum(row["kl_nats"] * row["num_tokens"] for row in report["reports"]) / report["num_generated_positions"]
    assert mean == pytest.approx(report["kl_nats"])
    assert "KL divergence (nats)" in (tmp_path / "loss.svg").read_text()
    words = ["eval", weight_only, "--against", engine_dir, "--input-file", prompts, "--figure", tmp_path / "loss.gif"]
    assert "a name that ends with .png or .svg" in invoke(*words).stderr


def test_engines_of_different_pairs_are_not_compared(engine_dir, prompts_file, tmp_path, invoke) -> None:
    other = make_target(tmp_path / "other", num_hidden_layers=2)
    built = invoke("build", "--target", other, "-o", tmp_path / "engine", "--dtype", "float32")
    assert built.exit_code == 0, built.stderr
    result = invoke("eval", tmp_path / "engine", "--against", engine_dir, "--input-file", prompts_file)
    assert result.exit_code == 2
    assert "expected the same in both" in result.stderr


def test_a_text_that_fails_in_the_engine_ends_the_comparison(engine_dir, prompts_file, invoke, monkeypatch) -> None:
    failed = output_without_tokens("r", "error", text="", error="the device is gone")
    monkeypatch.setattr("dflash_trt.serving.llm.LLM.generate", lambda self, prompts, *_, **__: [failed] * len(prompts))
    result = invoke("eval", engine_dir, "--against", engine_dir, "--input-file", prompts_file)
    assert result.exit_code == 2
    for number in (1, 2, 3):
        assert f"{number}: the device is gone" in result.stderr


def test_an_executor_that_scores_is_closed(engine_dir, monkeypatch) -> None:
    opened = []

    class Executor:
        target_logits = staticmethod(lambda token_ids: torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))

        def close(self) -> None:
            opened.remove(self)

    def open_one(engine: EngineDir, config: RuntimeConfig) -> Executor:
        opened.append(Executor())
        return opened[-1]

    monkeypatch.setattr("dflash_trt.executor.opening.open_executor", open_one)
    engine = EngineDir.open(engine_dir)
    with ExitStack() as stack:
        assert _logits_of(engine, RuntimeConfig(), stack)([5]).dtype == "float32"
        assert len(opened) == 1
    assert not opened


def test_an_engine_of_tensorrt_llm_is_compared_by_its_texts_and_acceptance(
    engine_dir, target, drafter, prompts_file, tmp_path, invoke, monkeypatch
) -> None:
    """Through a running server, whose tokens are transformers' in float32."""
    output = tmp_path / "exported"
    words = ["build", "--target", target, "--drafter", drafter, "-o", output, "--backend", "tensorrt_llm"]
    assert invoke(*words, "--max-seq-len", "96", "--max-num-tokens", "96").exit_code == 0
    with trtllm_server(Model(str(output / "target"), max_draft_len=3), None) as (url, _):
        monkeypatch.setenv(URL, url)
        words = [output, "--against", engine_dir, "--input-file", prompts_file]
        exit_code, report = evaluated(invoke, *words, "--min-acceptance-ratio", "0.1")
        assert exit_code == 0 and report["identical_texts_fraction"] == 1 and report["baseline_perplexity"] > 1
        assert report["candidate_acceptance"]["acceptance_length"] > 1
        unmeasured = ("kl_nats", "kl_nats_p99", "token_agreement_fraction", "candidate_perplexity")
        assert [report[name] for name in unmeasured] == [None] * 4 and report["num_generated_positions"] == 0
        assert evaluated(invoke, *words, "--max-kl", "1")[0] == 3  # what could not be measured passes no gate
        table = invoke("eval", *words, "--max-new-tokens", "8").stdout
        assert "KL divergence" not in table and "identical texts" in table
    result = invoke("eval", engine_dir, "--against", output, "--input-file", prompts_file)
    assert result.exit_code == 2 and "expected backend torch, for its logits, found tensorrt_llm" in result.stderr


def test_an_engine_may_be_compared_with_one_without_a_drafter_or_with_less_room(
    engine_dir, target, prompts_file, tmp_path, invoke
) -> None:
    plain = tmp_path / "plain"
    words = ["build", "--target", target, "-o", plain, "--dtype", "float32", "--max-seq-len", "6"]
    assert invoke(*words).exit_code == 0
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt_token_ids": [5, 6]}\n')
    for engines in ([engine_dir, "--against", plain], [plain, "--against", engine_dir]):
        result = invoke("eval", *engines, "--input-file", short, "--max-new-tokens", "2")
        assert result.exit_code == 0, result.stderr
        gated = invoke("eval", *engines, "--input-file", short, "--min-acceptance-ratio", "0.5")
        assert gated.exit_code == 2 and "generating" not in gated.stderr
        assert f"--min-acceptance-ratio: expected engines with a drafter, found {plain} without one" in gated.stderr
        refused = invoke("eval", *engines, "--input-file", prompts_file, "--max-new-tokens", "2")
        assert refused.exit_code == 2
        assert "error: prompts: 1: prompt: expected at most 5 tokens (max_seq_len - 1), found 7" in refused.stderr
        assert "generating" not in refused.stderr, "by either engine, before any is loaded"


def test_no_acceptance_is_expected_without_the_drafter(engine_dir, prompts_file, invoke) -> None:
    words = ["eval", engine_dir, "--against", engine_dir, "--input-file", prompts_file, "--no-drafter"]
    result = invoke(*words, "--min-acceptance-ratio", "1")
    assert result.exit_code == 2 and "generating" not in result.stderr
    assert "--no-drafter and --min-acceptance-ratio are mutually exclusive" in result.stderr
    assert invoke(*words, "--max-new-tokens", "2").exit_code == 0


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
    result = invoke("eval", engine_dir, "--against", engine_dir, "--input-file", path)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_manifest_says_what_is_packed(weight_only) -> None:
    config = EngineDir.open(weight_only).manifest.pretrained_config
    assert config.quantization is not None
    assert set(config.quantization.linears.values()) == {"nvfp4_w4a16"}
    assert set(config.quantization.linears) < set(engine_weights(config.target, config.draft, config.quantization))


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
    result = invoke("build", "--target", target, "-o", tmp_path / "engine", "--quantization", "int3")
    assert result.exit_code == 2
    assert (
        "format of target: expected none, fp8, fp8_w8a16, fp8_block, int4, int8, mxfp4, nvfp4, nvfp4_w4a16, found int3"
        in result.stderr
    )


COMPARISON = Comparison(
    num_prompts=7,
    num_generated_positions=11,
    token_agreement_fraction=0.75,
    kl_nats=0.0625,
    kl_nats_p99=0.5,
    kl_num_top=None,
    identical_texts_fraction=0.375,
    num_prompt_positions=13,
    baseline_perplexity=20.5,
    candidate_perplexity=21.5,
    baseline_acceptance=Acceptance(acceptance_length=4.0, num_verify_steps=17),
    candidate_acceptance=Acceptance(acceptance_length=3.5, num_verify_steps=19),
    texts=(Distinct().of(ComparedText, kl_nats=None, is_agreeing=None),) * len(PROMPT_TOKENS),
)


@pytest.mark.parametrize(
    ("option", "value", "passing", "failing"),
    [
        ("max_kl", 0.0625, "0.07", "0.06"),
        ("min_acceptance_ratio", 0.875, "0.87", "0.88"),
        ("min_agreement", 0.75, "0.74", "0.76"),
    ],
)
def test_each_gate_bounds_its_own_number_from_its_own_side(
    engine_dir, prompts_file, invoke, monkeypatch, option, value, passing, failing
) -> None:
    monkeypatch.setattr("dflash_trt.cli.eval._measure", lambda engines, jobs, config: COMPARISON)
    words = [engine_dir, "--against", engine_dir, "--input-file", prompts_file]
    flag = f"--{option.replace('_', '-')}"
    for bound, exit_code, verdict in ((passing, 0, "passed"), (failing, 3, "FAILED")):
        exit_code_of_json, report = evaluated(invoke, *words, flag, bound)
        gate = {"name": option, "bound": float(bound), "value": value, "has_passed": exit_code == 0}
        assert (exit_code_of_json, report["gates"]) == (exit_code, [gate])
        result = invoke("eval", *words, flag, bound)
        side = "at most" if option == "max_kl" else "at least"
        assert (result.exit_code, f"gate {option} ({side} {bound}): {value:g} {verdict}" in result.stdout) == (
            exit_code,
            True,
        )


def test_the_table_has_each_number_in_its_row_and_column(engine_dir, prompts_file, invoke, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.cli.eval._measure", lambda engines, jobs, config: COMPARISON)
    monkeypatch.setenv("COLUMNS", "160")
    stdout = invoke("eval", engine_dir, "--against", engine_dir, "--input-file", prompts_file).stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stdout.splitlines() if line.startswith("│")]
    assert rows == [
        ["token agreement", "", "0.7500", "11 generated positions"],
        ["KL divergence, mean (nats)", "", "0.0625", "11 generated positions"],
        ["KL divergence, 99th percentile", "", "0.5", "11 generated positions"],
        ["identical texts", "", "0.3750", "7 prompts"],
        ["perplexity", "20.5", "21.5", "13 prompt positions"],
        ["acceptance length, bonus included", "4", "3.5", "17 and 19 verify steps"],
        ["acceptance ratio", "", "0.875", ""],
    ]
    monkeypatch.setattr("dflash_trt.cli.eval._measure", lambda *given: replace(COMPARISON, kl_num_top=20))
    stdout = invoke("eval", engine_dir, "--against", engine_dir, "--input-file", prompts_file).stdout
    assert "KL divergence of top 20, mean (nats)" in stdout


def test_the_baseline_is_the_engine_of_against(engine_dir, weight_only, prompts_file, invoke, monkeypatch) -> None:
    measured = {}
    monkeypatch.setattr(
        "dflash_trt.cli.eval._measure", lambda engines, jobs, config: measured.update(engines) or COMPARISON
    )
    _, report = evaluated(invoke, weight_only, "--against", engine_dir, "--input-file", prompts_file)
    assert {name: engine.path for name, engine in measured.items()} == {
        "candidate": weight_only,
        "baseline": engine_dir,
    }
    assert (report["candidate"], report["baseline"]) == (str(weight_only), str(engine_dir))


def test_each_engine_generates_and_scores_for_its_own_side(
    engine_dir, weight_only, prompts_file, invoke, monkeypatch
) -> None:
    """KL divergence is not symmetric, and perplexities differ: sides that are swapped show."""
    _, there = evaluated(invoke, weight_only, "--against", engine_dir, "--input-file", prompts_file)
    _, back = evaluated(invoke, engine_dir, "--against", weight_only, "--input-file", prompts_file)
    assert there["candidate_perplexity"] == back["baseline_perplexity"] != there["baseline_perplexity"]
    assert there["baseline_acceptance"] == back["candidate_acceptance"]
    assert there["kl_nats"] != back["kl_nats"]
    from dflash_trt.executor.opening import open_executor

    engine = EngineDir.open(engine_dir)
    executor = open_executor(engine, RuntimeConfig(use_drafter=False))
    nats = [
        -float(executor.target_logits(tokens[:-1]).double().log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].sum())
        for tokens in PROMPT_TOKENS
    ]
    executor.close()
    assert there["baseline_perplexity"] == pytest.approx(math.exp(sum(nats) / 10), rel=1e-5)
