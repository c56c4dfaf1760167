"""`bench speedup`: one target with every drafting algorithm and none, side by side."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dflash_trt.bench import speedup
from dflash_trt.bench.speedup import SideReport
from dflash_trt.cli.main import cli
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.serving.llm import LLM
from tests.dflash2_files import make_dflash2_drafter
from tests.eagle3_files import save_eagle3_head
from tests.factories import make_target, make_zlab_drafter
from tests.plan.test_machine_file import MACHINE

SAMPLING = SamplingParams(max_new_tokens=20, ignore_eos=True)


def output(*token_ids: int, **fields: Any) -> GenerationOutput:
    counts = {"num_verify_steps": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "num_emitted_by_verify": 5}
    times = {"time_to_first_token_s": 0.5, "total_s": 2.0}
    values = {"request_id": "r", "text": None, "logprobs": (), "finish_reason": "length", "num_prompt_tokens": 1}
    return GenerationOutput(token_ids=token_ids, **(values | counts | times | fields))  # type: ignore[arg-type]


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, words)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines dflash, dflash2 and eagle3 of one target, one without a drafter, and one of another target and dtype."""
    root = tmp_path_factory.mktemp("bench")
    target = make_target(root / "target")
    paths = {
        "dflash": make_zlab_drafter(root / "drafter.dflash", target_dir=target),
        "dflash2": make_dflash2_drafter(root / "drafter.dflash2", target_dir=target),
        "eagle3": save_eagle3_head(root / "drafter.eagle3", target_dir=target, draft_tokens=range(0, 272, 2)),
        "none": "none",
    }
    for name, drafter in paths.items():
        options = ("--dtype", "float32", "--max-seq-len", 96)
        built = run("build", "--target", target, "--drafter", drafter, "-o", root / name, *options)
        assert built.exit_code == 0, built.output
    other = make_target(root / "other", num_hidden_layers=3)
    make_zlab_drafter(root / "drafter.other", target_dir=other)
    built = run("build", "--target", other, "--drafter", root / "drafter.other", "-o", root / "another")
    assert built.exit_code == 0, built.output
    texts = {"def f():": {}, "import os": {"category": "imports"}, "x = 1": {}}
    rows = (json.dumps({"prompt": text} | fields) + "\n" for text, fields in texts.items())
    (root / "prompts.jsonl").write_text("".join(rows))
    return root


def compared(root: Path, *names: str, options: tuple[object, ...] = ()) -> Result:
    engines = [root / name for name in names]
    few = ("--rounds", 2, "--max-new-tokens", 12, "--concurrency", 2)
    return run("bench", "speedup", *engines, "--input-file", root / "prompts.jsonl", *few, *options)


def test_every_algorithm_gives_the_texts_of_none(root: Path) -> None:
    (root / "machine.json").write_text(MACHINE.text())
    options = ("--json", "--machine", root / "machine.json")
    result = compared(root, "dflash", "dflash2", "eagle3", options=options)
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    assert [report["algorithm"] for report in reports] == [None, "dflash", "dflash2", "eagle3"]
    assert [report["num_draft_tokens"] for report in reports] == [0, 3, 3, 7]
    assert all(report["num_equal_texts"] == report["num_prompts"] == 3 for report in reports)
    assert all(len(report["speedup_by_round"]) == 2 for report in reports)
    assert reports[0]["speedup"] == 1.0 and reports[0]["acceptance_length"] is None
    assert all(len(report["accepted_fraction_by_position"]) == report["num_draft_tokens"] for report in reports)
    context_len = round((8 + 9 + 5) / 3 + 12 / 2)  # half way through the 12 tokens
    for report in reports:
        roof = report["roofline"]
        assert (roof["machine"], roof["num_requests"], roof["context_len"]) == (MACHINE.name, 2, context_len)
        assert roof["num_draft_tokens"] == report["num_draft_tokens"]


def test_the_table_has_a_line_for_each_side_and_k_holds_for_all(root: Path) -> None:
    result = compared(root, "eagle3", "dflash", options=("--draft-length", 2))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = ["autoregressive", "eagle3, K = 2 (eagle3)", "dflash, K = 2 (dflash)"]
    assert [line.split("  ")[0] for line in lines[2:5]] == names
    assert lines.count("  equal texts 3 of 3") == 2
    assert sum(line.startswith("  acceptance length by category: imports ") for line in lines) == 2
    floors = [line.partition(": floor of a step (2 x ") for line in lines[-3:]]
    assert [name for name, _, _ in floors] == names
    assert [found.partition("K = ")[2][0] for _, _, found in floors] == ["0", "2", "2"]


def test_a_side_is_compared_with_none_round_by_round_without_the_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([1.0, 500.0, 10.0, 30.0, 20.0, 20.0, 40.0, 100.0])
    texts = {None: [(1, 2, 3), (4, 5)], "dflash": [(1, 2, 3), (4, 6)]}

    def played(llm: LLM, prompts: object, sampling: object, concurrency: int) -> tuple[list[GenerationOutput], float]:
        assert not llm.config.enable_prefix_caching and concurrency == 5
        side = "dflash" if llm.config.use_drafter else None
        return [output(*text, num_verify_steps=2, num_emitted_by_verify=5) for text in texts[side]], next(speeds)

    monkeypatch.setattr(speedup, "run_prompts", played)
    plain, drafted = speedup.compare(
        [root / "dflash"],
        ["a", "b"],
        SAMPLING,
        config=RuntimeConfig(device="cpu", draft_length=2),
        concurrency=5,
        num_rounds=3,
        categories=["prose", None],
        progress=lambda line: None,
    )
    assert plain.acceptance_length_by_category == {} and drafted.acceptance_length_by_category == {"prose": 2.5}
    assert (plain.algorithm, plain.num_draft_tokens, plain.output_tok_per_s, plain.speedup) == (None, 0, 20.0, 1.0)
    assert plain.acceptance_length is None and plain.num_equal_texts == plain.num_prompts == 2
    assert (drafted.algorithm, drafted.num_draft_tokens, drafted.output_tok_per_s) == ("dflash", 2, 30.0)
    assert (drafted.speedup_by_round, drafted.speedup) == ((3.0, 1.0, 2.5), 2.5)
    assert (drafted.acceptance_length, drafted.num_equal_texts) == (2.5, 1)


def test_engines_that_cannot_be_compared_are_refused(root: Path) -> None:
    result = compared(root, "dflash", "none", "another")
    assert result.exit_code == 2
    assert "none: expected an engine with a drafter" in result.output
    assert "another dtype: expected float32, found bfloat16. Build it as" in result.output
    assert "another target: expected the target of" in result.output


def test_more_drafts_than_an_engine_makes_are_refused_before_any_side_runs(root: Path) -> None:
    result = compared(root, "eagle3", "dflash", options=("--draft-length", 5))
    assert result.exit_code == 2 and "expected 0 to 3" in result.output
    assert "round" not in result.output


def test_a_run_warms_up_and_takes_so_many_prompts_at_a_time(monkeypatch) -> None:
    calls: list[tuple[int, int]] = []

    class Engine:
        def generate(self, prompts: list[str], sampling: SamplingParams) -> list[GenerationOutput]:
            calls.append((len(prompts), sampling.max_new_tokens))
            return [output(1, 2, 3) for _ in prompts]

    clock = iter([10.0, 14.0])
    monkeypatch.setattr(speedup.time, "perf_counter", lambda: next(clock))
    outputs, speed = speedup.run_prompts(Engine(), list("abc"), SAMPLING, 2)  # type: ignore[arg-type]
    assert calls == [(2, 8), (2, 20), (1, 20)]
    assert (len(outputs), speed) == (3, 9 / 4)


def test_the_text_says_each_number_with_its_unit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SideReport(
        algorithm=None,
        engine_dir=str(root / "dflash"),
        num_draft_tokens=0,
        num_prompts=3,
        output_tok_per_s=111.1,
        speedup=1.0,
        speedup_by_round=(1.0, 1.0),
        acceptance_length=None,
        acceptance_length_interval=None,
        acceptance_length_by_category={},
        specdec_bench_acceptance_length=None,
        accepted_fraction_by_position=(),
        num_equal_texts=3,
        distinct_4gram_fraction=0.5,
    )
    drafted = replace(
        plain,
        algorithm="dflash",
        num_draft_tokens=2,
        output_tok_per_s=222.2,
        speedup=2.0,
        speedup_by_round=(1.5, 2.5),
        acceptance_length=3.25,
        acceptance_length_interval=(3.0, 3.5),
        acceptance_length_by_category={"math": 3.5, "prose": 3.0},
        specdec_bench_acceptance_length=3.125,
        accepted_fraction_by_position=(0.75, 0.5),
        num_equal_texts=2,
        distinct_4gram_fraction=0.875,
    )
    monkeypatch.setattr(speedup, "compare", lambda *arguments, **options: [plain, drafted])
    (root / "machine.json").write_text(MACHINE.text())
    result = compared(root, "dflash", options=("--machine", root / "machine.json"))
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:-2] == [
        "3 prompts, 12 new tokens each, 2 at a time, median of 2 rounds",
        "tok/s speedup by round",
        "autoregressive 111.1",
        "dflash, K = 2 (dflash) 222.2 2.00x 1.50 2.50",
        "",
        "dflash, K = 2 (dflash)",
        "acceptance length 3.25 tokens per verify step, bonus included (95% interval over prompts: 3.00 to 3.50)",
        "by specdec_bench 3.12 tokens per step, the prefill's first token a step of 1, mean over requests",
        "acceptance length by category: math 3.50, prose 3.00",
        "accepted by draft position 1: 0.75 2: 0.50",
        "equal texts 2 of 3",
        "distinct 4-grams 0.88 of all",
    ]
    assert [line.partition(": floor of a step (2 x ")[0] for line in lines[-2:]] == [lines[2][:14], lines[5]]
