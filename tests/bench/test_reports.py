"""The measurements measure what they say; how fast anything is, is for docs/benchmarks.md."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_trt.bench.lockstep import Lockstep, Work
from dflash_trt.bench.roofline import Roofs, mean_context_len
from dflash_trt.bench.speedup import distinct_fraction
from dflash_trt.cli.main import cli
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import open_executor
from dflash_trt.plan.step_floor import Step, step_floor
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.serving.prompts import PromptReader
from tests.factories import make_target, make_zlab_drafter
from tests.plan.test_machine_file import MACHINE

CONTEXT_LEN = round((8 + 9 + 5) / 3 + 16 / 3 / 2)  # of the prompts below, half way through a third of 16 tokens


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    target = make_target(root / "target")
    drafter = make_zlab_drafter(root / "drafter", target_dir=target)
    words = ["build", "--target", target, "--drafter", drafter, "-o", root / "engine", "--dtype", "float32"]
    result = CliRunner().invoke(cli, [*map(str, words), "--max-seq-len", "96"])
    assert result.exit_code == 0, result.output
    return root / "engine"


@pytest.fixture(scope="module")
def input_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f():", "import os", "x = 1")))
    return path


def bench_json(*words):
    result = CliRunner().invoke(cli, ["bench", *map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["reports"]


def test_speedup_compares_equal_texts_of_the_asked_length(engine_dir, input_file):
    plain, drafted = bench_json(
        "speedup", engine_dir, "--input-file", input_file, "--rounds", 2, "--max-new-tokens", 12, "--concurrency", 2
    )
    assert drafted["num_equal_texts"] == drafted["num_prompts"] == 3
    assert len(drafted["speedup_by_round"]) == 2
    length = drafted["acceptance"]["length"]
    assert drafted["num_draft_tokens"] == 3 == len(drafted["acceptance"]["by_position"])
    assert 1 <= drafted["specdec_bench_acceptance_length"] <= length <= 4
    assert (plain["roofline"]["num_draft_tokens"], drafted["roofline"]["num_draft_tokens"]) == (0, 3)
    assert plain["roofline"]["context_len"] == drafted["roofline"]["context_len"] > 6  # half of the answer
    for report in (plain, drafted):
        roof = report["roofline"]
        assert roof["floor_s"] == max(roof["memory_floor_s"], roof["compute_floor_s"]) > 0
        assert roof["reached_fraction"] == pytest.approx(report["output_tok_per_s"] / roof["floor_tok_per_s"])
        assert 0 < roof["reached_fraction"] < 1
    floor = drafted["roofline"]
    assert floor["floor_tok_per_s"] == pytest.approx(2 * length / floor["floor_s"])


def test_a_machine_file_takes_the_place_of_a_measurement_of_now(engine_dir, input_file, tmp_path):
    path, words = tmp_path / "machine.json", ["--input-file", input_file, "--rounds", 1, "--max-new-tokens", 4]
    floors = []
    for rate in (1e6, 2e6):
        path.write_text(
            MACHINE.model_copy(update={"copy_bytes_per_s_by_working_set_bytes": {1: rate}, "name": "slow"}).text()
        )
        roof = bench_json("speedup", engine_dir, *words, "--machine", path)[0]["roofline"]
        assert roof["machine"] == "slow"
        floors.append(roof["memory_floor_s"])
    assert floors[0] == pytest.approx(2 * floors[1])


def test_a_roofline_is_the_floor_of_the_drafts_that_steps_have(engine_dir):
    engine = EngineDir.open(engine_dir)
    roofs, config, gpu = Roofs(engine, MACHINE), engine.manifest.pretrained_config, MACHINE.gpu
    for given, length, drafts in ((0, None, 0), (3, 2.5, 3), (None, 2.5, 2), (None, 3.0, 2), (None, None, 0)):
        found = roofs.beside(10.0, num_requests=2, context_len=50, acceptance_length=length, num_draft_tokens=given)
        step = Step(num_requests=2, context_len=50, num_draft_tokens=drafts)
        floor = step_floor(config, gpu, step, has_drafter=drafts > 0)
        assert (found.num_draft_tokens, found.is_least_k) == (drafts, given is None and drafts > 0)
        assert (found.floor_s, found.memory_floor_s, found.compute_floor_s) == (
            floor.total_s,
            floor.memory_s,
            floor.compute_s,
        )
        assert found.floor_tok_per_s == pytest.approx(2 * (length or 1.0) / floor.total_s)
        assert found.reached_fraction == pytest.approx(10.0 / found.floor_tok_per_s)
    assert mean_context_len([10, 20], 30.0) == 15 + 15


@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({}, None),
        ({"draft_length": 2}, 2),
        ({"use_drafter": False}, 0),
        ({"draft_length": 3, "adaptive_draft_length": True}, None),
        ({"draft_length": {1: 3, 4: 2}}, None),
    ],
)
def test_steps_have_one_number_of_drafts_where_the_settings_fix_it(engine_dir, settings, drafts):
    roofs = Roofs(EngineDir.open(engine_dir), MACHINE)
    assert roofs.fixed_drafts(RuntimeConfig().replaced(**settings)) == drafts


def test_throughput_reports_every_policy_at_every_concurrency(engine_dir, input_file):
    options = (
        "--rounds",
        2,
        "--max-new-tokens",
        16,
        "--requests-per-client",
        2,
        "--fixed-lengths",
        0,
        "--fixed-lengths",
        3,
    )
    reports = bench_json(
        "throughput", engine_dir, "--input-file", input_file, *options, "--concurrency", 1, "--concurrency", 4
    )
    assert [report["concurrency"] for report in reports] == [1, 4]
    for report in reports:
        assert [speed["policy"] for speed in report["speeds"]] == ["K = 0", "K = 3", "adaptive"]
        plain, drafting, _ = (speed["acceptance_length"] for speed in report["speeds"])
        assert plain in (None, 1.0) and drafting >= 1
        assert report["best_fixed"] == f"K = {report['best_fixed_length']}" and report["best_fixed_length"] in (0, 3)
        assert len(report["adaptive_to_best_fixed_by_round"]) == 2
        labels = [(roof["label"], roof["num_draft_tokens"]) for roof in report["rooflines"]]
        shapes = {(roof["num_requests"], roof["context_len"]) for roof in report["rooflines"]}
        assert shapes == {(report["concurrency"], CONTEXT_LEN)}
        adaptive = math.ceil(report["speeds"][2]["acceptance_length"] or 1) - 1
        assert labels == [("K = 0", 0), ("K = 3", 3), ("adaptive", adaptive)]


def test_a_length_beyond_the_engine_is_refused(engine_dir, input_file):
    words = ["bench", "throughput", str(engine_dir), "--input-file", str(input_file), "--fixed-lengths", "9"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "error: --fixed-lengths: expected 0 to 3, this engine's max_draft_len, found 9" in result.stderr


def test_sides_in_lockstep_do_all_the_work_and_keep_off_each_others_pages(engine_dir):
    executor = open_executor(EngineDir.open(engine_dir), RuntimeConfig(kv_cache_bytes=1 << 22, device="cpu"))
    num_pages = executor.limits.num_pages // 2
    halves: set[frozenset[int]] = set()

    class Recording:
        limits, has_queue, can_retry = executor.limits, False, True

        def submit(self, plan):
            halves.add(frozenset((plan.page_updates.page_ids // num_pages).tolist()))
            return executor.submit(plan)

    work = [
        Work(prompt={"prompt_token_ids": [5, 6, number]}, sampling=SamplingParams(max_new_tokens=9, ignore_eos=True))
        for number in range(5)
    ]
    sides = Lockstep(
        Recording(), {"plain": FixedDraftLength(0), "three": FixedDraftLength(3)}, PromptReader(None, vocab_size=64)
    )
    reports = sides.run(work, concurrency=2)
    sides.close()
    assert {report.num_output_tokens for report in reports.values()} == {45}
    assert halves == {frozenset({0}), frozenset({1})}
    assert min(report.elapsed_s for report in reports.values()) > 0


def test_an_invalid_row_is_refused_before_anything_runs(engine_dir, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    result = CliRunner().invoke(cli, ["bench", "speedup", str(engine_dir), "--input-file", str(path)])
    assert result.exit_code == 2
    assert "2: input row: 2 problems" in result.stderr and "Did you mean 'prompt'?" in result.stderr
    result = CliRunner().invoke(cli, ["bench", "speedup", str(engine_dir), "--input-file", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "none: expected a JSONL file or a data set, found no such file or directory" in result.stderr


@pytest.mark.parametrize(
    ("token_ids", "expected"), [(range(10), 1.0), ([1, 2] * 10, 2 / 17), ([7, 7, 7], 1.0), ([7] * 5, 0.5)]
)
def test_distinct_fraction_counts_different_4grams(token_ids, expected):
    assert distinct_fraction(list(token_ids)) == pytest.approx(expected)
