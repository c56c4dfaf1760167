"""`dflash-trt plan` from config.json files: what fits, what does not, and what it says about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.backends.page_budget import GPU_FREE_MEMORY_FRACTION
from dflash_trt.plan.rank_memory import CONTEXT_BYTES
from scripts.published_shapes import write_shape
from tests.cli.conftest import Invoke
from tests.hub_server import Hub, point_at, serving
from tests.plan.test_step_floor import DRAFTER, QWEN3_8B, write

GIB = 2**30


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("published")
    return write(root, "target", QWEN3_8B), write(root, "drafter", DRAFTER)


def plan(invoke: Invoke, *words: Any) -> dict[str, Any]:
    result = invoke("plan", *words, "--json")
    assert result.exit_code == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_an_engine_that_fits_says_for_how_many_requests(pair, invoke) -> None:
    report = plan(invoke, *pair, "--gpu", "h200", "--max-batch-size", 256)
    assert report["fits"] and report["missing_bytes"] == 0 and report["remedies"] == []
    memory = report["rank_memory"]
    free = report["gpu"]["memory_bytes"] - CONTEXT_BYTES - memory["weights_bytes"]
    assert report["kv_pages"]["num_pages"] == int(free * GPU_FREE_MEMORY_FRACTION) // (32 * (147456 + 20480))
    assert memory["left_bytes"] == report["gpu"]["memory_bytes"] - sum(memory.values()) + memory["left_bytes"] > 0
    assert report["max_requests"] == {"1024": 256, "8192": report["kv_tokens"] // 8192, "32768": 18}
    shown = invoke("plan", *pair, "--gpu", "h200").stdout
    assert f"fits on h200: K/V pages for {report['kv_tokens']:,} tokens" in shown


def test_states_of_a_hybrid_and_their_snapshots_are_shown_and_of_other_targets_no_zeros(pair, invoke, tmp_path) -> None:
    fields = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    target = write(tmp_path, "hybrid", QWEN3_8B | fields)
    words = (target, "--gpu", "h200", "--max-batch-size", 7)
    memory = plan(invoke, *words)["rank_memory"]
    assert memory["snapshot_bytes"] == memory["state_bytes"] * 7 // 8 > 0  # one more slot is for padding
    title = "snapshots of it, for prefixes"
    assert title in invoke("plan", *words).stdout and title not in invoke("plan", *pair, "--gpu", "h200").stdout


def test_speeds_of_users_follow_from_the_floor_and_the_acceptance_length(pair, invoke) -> None:
    words = ("--gpu", "h200", "--acceptance-length", "3,4.5", "--concurrency", "1,4", "--context", "2048")
    steps = plan(invoke, *pair, *words)["steps"]
    assert [(step["num_requests"], step["context_len"]) for step in steps] == [(1, 2048), (4, 2048)]
    for step in steps:
        speeds = step["tok_per_s_by_acceptance_length"]
        assert speeds == {"3": pytest.approx(3 / step["total_s"]), "4.5": pytest.approx(4.5 / step["total_s"])}
    assert steps[0]["autoregressive_tok_per_s"] == pytest.approx(4.8e12 / (2 * 7.57e9 + 0.3e9), rel=0.01)


def test_the_table_of_steps_has_the_units_of_its_columns(pair, invoke) -> None:
    words = (
        *pair,
        "--gpu",
        "h200",
        "--acceptance-length",
        "3",
        "--concurrency",
        "4",
        "--context",
        "2048",
        "--tp-size",
        2,
    )
    [step] = plan(invoke, *words)["steps"]
    shown = invoke("plan", *words).stdout
    [row] = [line.split("│")[1:-1] for line in shown.splitlines() if "4 x 2,048" in line]
    _, num_gb, *times, reach, alone, with_drafts = map(str.strip, row)
    assert float(num_gb) == pytest.approx((step["weights_bytes"] + step["kv_bytes"]) / 1e9, abs=0.05)
    assert list(map(float, times)) == pytest.approx(
        [1e3 * step[f"{part}_s"] for part in ("memory", "compute", "exchange")], abs=0.005
    )
    assert reach == f"{step['total_s'] / step['expected_s']:.0%}" and 0 < step["reached_fraction"] < 1
    assert float(alone) == pytest.approx(step["autoregressive_tok_per_s"], abs=0.5)
    assert float(with_drafts) == pytest.approx(3 / step["total_s"], abs=0.5)


def test_the_memory_of_each_rank_is_shown_in_gib(pair, invoke) -> None:
    words = (*pair, "--gpu", "h200", "--tp-size", 2)
    memory, shown = plan(invoke, *words)["rank_memory"], invoke("plan", *words).stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    found = {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].replace(".", "").isdigit()}
    titles = {
        "weights": "weights",
        "K/V pages": "kv",
        "left over": "left",
        "activations of the largest step": "activations",
    }
    for title, part in titles.items():
        assert found[title] == pytest.approx(memory[f"{part}_bytes"] / GIB, abs=0.005)
    assert found["one h200"] == pytest.approx(plan(invoke, *words)["gpu"]["memory_bytes"] / GIB, abs=0.005)
    assert "fits on 2 x h200: K/V pages" in shown
    assert "does not fit on 2 x GPU of 3 GiB: each lacks" in invoke("plan", *pair, "--gpu", 3, "--tp-size", 2).stdout


def test_contexts_and_batches_that_the_engine_cannot_have_are_left_out_or_replaced_by_its_most(pair, invoke) -> None:
    words = (*pair, "--gpu", "h200", "--max-seq-len", 8192, "--max-batch-size", 8)
    steps = [(step["context_len"], step["num_requests"]) for step in plan(invoke, *words)["steps"]]
    assert steps == [(1024, 1), (1024, 8), (8192, 1), (8192, 8)]
    report = plan(invoke, *words, "--max-seq-len", 1000, "--max-draft-len", 2)
    assert list(report["max_requests"]) == ["1000"]
    assert set(report["steps"][0]["tok_per_s_by_acceptance_length"]) == {"2", "3"}
    alone = plan(invoke, pair[0], "--gpu", "h200", "--context", 1024)["steps"][0]
    assert alone["tok_per_s_by_acceptance_length"] == {}
    assert alone["autoregressive_tok_per_s"] == pytest.approx(1 / alone["total_s"])
    beside = plan(invoke, *pair, "--gpu", "h200", "--context", 1024)["steps"][0]
    assert beside["autoregressive_tok_per_s"] == pytest.approx(alone["autoregressive_tok_per_s"])
    assert beside["expected_s"] > alone["expected_s"]


def test_steps_that_have_no_room_are_left_out(pair, invoke) -> None:
    words = ("--gpu", "h100", "--concurrency", "1,64", "--context", "1024,32768")
    shown = [(step["num_requests"], step["context_len"]) for step in plan(invoke, *pair, *words)["steps"]]
    assert shown == [(1, 1024), (64, 1024), (1, 32768)]


def test_a_gpu_of_a_size_has_memory_and_no_floors(pair, invoke) -> None:
    report = plan(invoke, *pair, "--gpu", "48")
    assert report["gpu"]["memory_bytes"] == 48 * GIB
    assert report["fits"] and report["steps"] == []


SMALL_STEPS = ("--max-batch-size", 8, "--max-num-tokens", 256)


@pytest.mark.parametrize(
    ("gib", "limits", "changes"),
    [
        (24, SMALL_STEPS, ["--tp-size 2", "--quantization fp8", "--kv-cache fp8", "--max-seq-len 29600"]),
        (
            28,
            ("--max-batch-size", 8, "--max-num-tokens", 16384),
            ["--tp-size 2", "--quantization fp8", "--max-num-tokens 8192", "--max-seq-len 5696"],
        ),
    ],
)
def test_what_does_not_fit_says_by_how_much_and_what_would_help(pair, invoke, gib, limits, changes) -> None:
    """The first lacks pages, the second room for a step beside them."""
    report = plan(invoke, *pair, "--gpu", gib, *limits)
    missing = report["missing_bytes"]
    assert not report["fits"] and missing > 0
    assert [remedy["change"] for remedy in report["remedies"]] == changes
    for change in changes:
        assert plan(invoke, *pair, "--gpu", gib, *limits, *change.split())["fits"], change
    enough = gib + missing / GIB
    assert plan(invoke, *pair, "--gpu", enough + 1e-6, *limits)["fits"]
    assert not plan(invoke, *pair, "--gpu", enough - 1e-3, *limits)["fits"]
    shown = invoke("plan", *pair, "--gpu", gib, *limits)
    assert shown.exit_code == 0
    assert f"does not fit on GPU of {gib} GiB: it lacks " in shown.stdout
    assert "fits with --tp-size 2: K/V pages for" in shown.stdout


def test_the_context_of_a_remedy_is_the_longest_that_fits(pair, invoke) -> None:
    words = (*pair, "--gpu", 24, *SMALL_STEPS)
    length = int(plan(invoke, *words)["remedies"][-1]["change"].split()[1])
    assert not plan(invoke, *words, "--max-seq-len", length + 32)["fits"]


def test_nothing_helps_a_gpu_that_is_far_too_small(pair, invoke) -> None:
    shown = invoke("plan", *pair, "--gpu", "1.5").stdout
    assert "no single change of ranks, format, pages, context or step size makes it fit" in shown


@pytest.mark.parametrize("gpu", ["h300", "0", "-1", "nan", "inf"])
def test_an_unknown_gpu_names_the_known_ones(pair, invoke, gpu) -> None:
    result = invoke("plan", *pair, f"--gpu={gpu}")
    assert result.exit_code == 2
    expected = "one of h100, h200, b200, b300, or its memory in GiB"
    assert result.stderr == f"error: --gpu: expected {expected}, found {gpu}.\n"


def test_a_format_that_the_gpu_does_not_compute_is_refused(pair, invoke) -> None:
    result = invoke("plan", *pair, "--gpu", "h200", "--quantization", "nvfp4")
    assert result.exit_code == 2
    assert "format nvfp4: expected a GPU of compute capability 10.0 or later, found 9.0" in result.stderr
    assert plan(invoke, *pair, "--gpu", "b300", "--quantization", "nvfp4")["fits"]


def test_a_family_that_is_refused_says_so_before_any_arithmetic(tmp_path, invoke, monkeypatch) -> None:
    monkeypatch.setattr("dflash_trt.plan.planning.plan_engine", None)
    fields = QWEN3_8B | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    result = invoke("plan", write(tmp_path, "mamba", fields), "--gpu", "h200")
    assert result.exit_code == 2
    assert "MambaForCausalLM" in result.stderr


def test_a_config_without_needed_keys_names_them_all(tmp_path, invoke) -> None:
    fields = {name: value for name, value in QWEN3_8B.items() if name not in ("hidden_size", "num_hidden_layers")}
    result = invoke("plan", write(tmp_path, "broken", fields), "--gpu", "h200")
    assert result.exit_code == 2
    assert "hidden_size" in result.stderr and "num_hidden_layers" in result.stderr


def test_ranks_and_acceptance_lengths_that_cannot_be_are_refused(pair, invoke) -> None:
    result = invoke("plan", *pair, "--gpu", "h200", "--tp-size", 3)
    assert result.exit_code == 2
    assert "num_heads" in result.stderr
    for lengths in ("17", "2,17"):
        result = invoke("plan", *pair, "--gpu", "h200", "--acceptance-length", lengths)
        assert result.stderr == (
            "error: --acceptance-length: expected at most 16, max_draft_len 15 and the bonus token, found 17.\n"
        )
    result = invoke("plan", *pair, "--gpu", "h200", "--context", "1024,some")
    assert "--context: expected numbers of at least 1, separated by commas, found '1024,some'" in result.stderr


@pytest.mark.parametrize("flag", ["--context", "--concurrency", "--acceptance-length"])
@pytest.mark.parametrize("text", ["", "0", "2,0", "-1", "nan", "inf", "2,", "2;3"])
def test_a_list_of_numbers_has_numbers_of_at_least_1(pair, invoke, flag, text) -> None:
    result = invoke("plan", *pair, "--gpu", "h200", f"{flag}={text}")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{flag}: expected numbers of at least 1, separated by commas, found {text!r}" in result.stderr


def test_the_sources_are_a_file_of_build_or_directories(pair, invoke, tmp_path) -> None:
    target, drafter = pair
    (tmp_path / "pair.yaml").write_text(f"target: {target}\ndrafter: {drafter}\nmax_batch_size: 5\n")
    from_file = plan(invoke, tmp_path / "pair.yaml", "--gpu", "h200")
    assert from_file["build_config"]["max_batch_size"] == 5
    options = ("--target", target, "--drafter", drafter, "--max-batch-size", 5, "--gpu", "h200")
    assert plan(invoke, *options) == from_file
    assert plan(invoke, *(path / "config.json" for path in pair), "--max-batch-size", 5, "--gpu", "h200") == from_file
    assert plan(invoke, target, "--gpu", "h200")["draft"] is None
    doubled = invoke("plan", target, "--target", target, "--gpu", "h200")
    assert doubled.stderr == "error: plan: --target and directories without an option are mutually exclusive.\n"
    assert "expected CONFIG.yaml, or TARGET and DRAFTER" in invoke("plan", "a", "b", "c", "--gpu", "h200").stderr


def test_names_on_the_hub_and_recipes_are_planned_from_their_configs(
    pair, invoke, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    monkeypatch.chdir(tmp_path)
    with serving(Hub()) as hub:
        hub.add("Qwen/Qwen3-8B", target)
        hub.add("z-lab/Qwen3-8B-DFlash-b16", drafter)
        point_at(hub, tmp_path / "cache", monkeypatch)
        expected = plan(invoke, target, drafter, "--gpu", "h200")
        for sources in (["Qwen/Qwen3-8B"], ["Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16@main"]):
            assert plan(invoke, *sources, "--gpu", "h200") == expected
        recipe = plan(invoke, "qwen3-8b-bf16", "--gpu", "h200")
        assert recipe["build_config"] == expected["build_config"] | {"max_num_tokens": 8192}
        assert set(hub.files) == {"config.json"}


def test_a_plan_for_tensorrt_counts_its_constants(pair, invoke) -> None:
    words = (*pair, "--gpu", "h200", "--max-seq-len", 4096, "--max-batch-size", 512)
    memory = [plan(invoke, *words, "--backend", name)["rank_memory"] for name in ("torch", "tensorrt")]
    sliced, rope = 5 * 2048 * 4096 * 2, 2 * (4096 + 2 * 15) * 128 * 2
    difference = memory[1]["weights_bytes"] - memory[0]["weights_bytes"]
    assert difference == pytest.approx(sliced + rope, abs=2 * 128 * 2 * 64)
    free = plan(invoke, *words)["gpu"]["memory_bytes"] - sum(memory[1].values()) + memory[1]["kv_bytes"]
    free += memory[1]["left_bytes"]  # its contexts have their activations before the pages are planned
    assert memory[1]["kv_bytes"] == int(free * 0.9) // (32 * 167936) * 32 * 167936


def test_ranks_with_requests_of_their_own_divide_those_of_a_step(tmp_path: Path, invoke) -> None:
    target = write_shape(tmp_path, "openai/gpt-oss-120b")
    ranks = ("--gpu", "h200", "--tp-size", 4, "--ep-size", 4, "--attention-dp", "--max-batch-size", 16)
    report = plan(invoke, target, *ranks, "--concurrency", "1,8,62", "--context", 1024)
    assert [step["num_requests"] for step in report["steps"]] == [4, 8, 64], "as many on every rank"
    alone = plan(invoke, target, "--gpu", "h200", "--concurrency", "2", "--context", 1024)["steps"][0]
    assert report["steps"][1]["kv_bytes"] == alone["kv_bytes"], "two requests of the eight"
