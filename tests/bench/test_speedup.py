"""`bench speedup`: one target with every drafting algorithm and none, side by side."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from dflash_trt.bench import speedup
from dflash_trt.bench.acceptance import Acceptance
from dflash_trt.bench.acceptance_figure import canvas_of
from dflash_trt.bench.conversation import Conversation
from dflash_trt.bench.intervals import Interval
from dflash_trt.bench.speedup import Run, SideReport
from dflash_trt.cli.main import cli
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import GenerationOutput, SamplingParams, TokenEvent
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
    told = json.loads(result.stdout)
    reports = told["reports"]
    assert [report["name"] for report in reports] == ["autoregressive", "dflash", "dflash2", "eagle3"]
    assert [report["algorithm"] for report in reports] == [None, "dflash", "dflash2", "eagle3"]
    assert [report["num_draft_tokens"] for report in reports] == [0, 3, 3, 7]
    assert all(report["num_equal_texts"] == report["num_prompts"] == 3 for report in reports)
    assert all(len(report["speedup_by_round"]) == 2 for report in reports)
    assert reports[0]["speedup"] == 1.0 and reports[0]["acceptance"] is None
    assert all(len(report["acceptance"]["by_position"]) == report["num_draft_tokens"] for report in reports[1:])
    assert told["warnings"] == ["3 prompts are too few for intervals over prompts: use 10 or more"]
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
    assert [line.split("  ")[0] for line in lines[1:4]] == names
    assert lines.count("  equal texts 3 of 3") == 2
    assert sum(line.startswith("  acceptance length by category: imports ") for line in lines) == 2
    floors = [line.partition(": floor of a step (2 x ") for line in lines[-6:-3]]
    assert [line.partition(":")[0] for line in lines[-3:]] == ["hardware", "workload", "command"]
    assert [name for name, _, _ in floors] == names
    assert [found.partition("K = ")[2][0] for _, _, found in floors] == ["0", "2", "2"]


def steps(*blocks: tuple[int, int], context_len: int = 5) -> tuple[TokenEvent, ...]:
    """Verify steps with these (candidates, accepted)."""
    return tuple(
        TokenEvent("r", (), context_len=context_len, num_candidates=candidates, num_accepted=accepted)
        for candidates, accepted in blocks
    )


def test_a_side_is_compared_with_none_round_by_round_without_the_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([9.0, 9.0, 1.0, 0.5, 2.0, 2.0, 3.0, 1.0])  # of the first group; the second takes as long
    seeds: list[int | None] = []

    def played(llm: LLM, conversations: object, sampling: SamplingParams, concurrency: int) -> Run:
        assert not llm.config.enable_prefix_caching and concurrency == 1
        seeds.append(llm.config.seed)
        drafts = llm.config.use_drafter
        first = output(1, 2, 3, steps=steps((2, 2), (2, 1)) if drafts else ())
        second = output(4, 6 if drafts else 5, steps=steps((2, 0), context_len=70) if drafts else ())
        elapsed = next(seconds)
        return Run(answers=((first,), (second,)), seconds=(elapsed, elapsed))

    monkeypatch.setattr(speedup, "run_conversations", played)
    lines: list[tuple[int, int, str]] = []
    plain, drafted = speedup.compare(
        {"mine": root / "dflash"},
        [Conversation(prompt="a", category="prose"), Conversation(prompt="b")],
        SAMPLING,
        temperatures=[0.0],
        config=RuntimeConfig(device="cpu", draft_length=2),
        concurrency=1,
        num_rounds=3,
        progress=lambda *line: lines.append(line),
    )
    assert seeds == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [line[:2] for line in lines] == [(number, 8) for number in range(1, 9)]
    assert lines[-1][2] == "round 3, mine: 2 tok/s"
    assert (plain.name, plain.algorithm, plain.num_draft_tokens, plain.speedup) == ("autoregressive", None, 0, 1.0)
    assert plain.acceptance is None and plain.num_equal_texts == plain.num_prompts == 2
    assert plain.acceptance_by_category == plain.acceptance_by_context_len == {}
    assert (drafted.name, drafted.algorithm, drafted.num_draft_tokens) == ("mine", "dflash", 2)
    assert (drafted.speedup_by_round, drafted.speedup) == ((2.0, 1.0, 3.0), 2.0)
    assert drafted.output_tok_per_s == 2.5 and drafted.num_equal_texts == 1
    assert drafted.speedup_interval == Interval(low=1.0, high=3.0), "over rounds: both prompts are equally fast"
    assert drafted.acceptance is not None and drafted.acceptance.length == pytest.approx(6 / 3)
    assert drafted.acceptance.by_position == pytest.approx((2 / 3, 1 / 3))
    by_category, by_context = drafted.acceptance_by_category, drafted.acceptance_by_context_len
    assert {name: found.length for name, found in by_category.items()} == {"prose": 2.5}
    assert {name: found.length for name, found in by_context.items()} == {"4-7": 2.5, "64-127": 1.0}


def test_sampled_texts_of_all_rounds_count_and_are_not_compared(root: Path) -> None:
    plain, first, sampled, second = (
        report
        for report in speedup.compare(
            {"one": root / "dflash"},
            [Conversation(prompt="def f():")],
            SamplingParams(max_new_tokens=8, ignore_eos=True),
            temperatures=[0.0, 1.0],
            config=RuntimeConfig(device="cpu", num_threads=1),
            concurrency=1,
            num_rounds=3,
            progress=lambda *_: None,
        )
    )
    assert [report.temperature for report in (plain, first, sampled, second)] == [0.0, 0.0, 1.0, 1.0]
    assert (first.num_texts, first.num_equal_texts) == (1, 1)
    assert (second.num_texts, second.num_equal_texts, sampled.num_texts) == (3, None, 3)
    assert second.label == "dflash, K = 3 (one), T = 1"


def test_engines_that_cannot_be_compared_are_refused(root: Path) -> None:
    result = compared(root, "dflash", "none", "another")
    assert result.exit_code == 2
    assert "none: expected an engine with a drafter" in result.output
    assert "another dtype: expected float32, found bfloat16. Build it as" in result.output
    assert "another target: expected the target of" in result.output


def test_drafters_are_for_this_command_and_not_for_eval(root: Path) -> None:
    result = run("eval", root / "dflash", "--against", root / "eagle3", "--input-file", root / "prompts.jsonl")
    assert result.exit_code == 2 and "`dflash-trt bench speedup` compares drafters, with a gate, too." in result.output


def test_more_drafts_than_an_engine_makes_are_refused_before_any_side_runs(root: Path) -> None:
    result = compared(root, "eagle3", "dflash", options=("--draft-length", 5))
    assert result.exit_code == 2 and "expected 0 to 3" in result.output
    assert "round" not in result.output


class Engine:
    """Answers every prompt, and keeps what it was asked."""

    def __init__(self, **fields: Any) -> None:
        self.asked: list[tuple[list[Any], int]] = []
        self._fields = fields

    def generate(self, prompts: list[Any], sampling: SamplingParams) -> list[GenerationOutput]:
        self.asked.append((prompts, sampling.max_new_tokens))
        return [output(1, 2, 3, **self._fields) for _ in prompts]


def test_a_run_warms_up_and_takes_so_many_prompts_at_a_time(monkeypatch) -> None:
    engine = Engine()
    clock = iter([10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(speedup.time, "perf_counter", lambda: next(clock))
    conversations = [Conversation(prompt=text) for text in "abc"]
    run = speedup.run_conversations(engine, conversations, SAMPLING, 2)  # type: ignore[arg-type]
    assert engine.asked == [(["a", "b"], 8), (["a", "b"], 20), (["c"], 20)]
    assert (len(run.outputs), run.seconds, run.tok_per_s) == (3, (2.0, 1.0), 9 / 3)


def test_no_text_of_a_warm_up_is_longer_than_those_that_count() -> None:
    engine = Engine()
    short = replace(SAMPLING, max_new_tokens=5)
    speedup.run_conversations(engine, [Conversation(prompt="a")], short, 1)  # type: ignore[arg-type]
    assert engine.asked == [(["a"], 5)] * 2


def test_a_conversation_is_asked_turn_by_turn_with_the_answers_before() -> None:
    engine = Engine(text="yes")
    one, two = ({"role": "user", "content": text} for text in ("one", "two"))
    conversations = [Conversation(turns=((one,), (two,)), fields={"a": 1}), Conversation(prompt="b")]
    run = speedup.run_conversations(engine, conversations, SAMPLING, 2)  # type: ignore[arg-type]
    answered = {"messages": [one, {"role": "assistant", "content": "yes"}, two], "a": 1}
    assert [prompts for prompts, _ in engine.asked[2:]] == [[{"messages": [one], "a": 1}, "b"], [answered]]
    assert [len(answers) for answers in run.answers] == [2, 1]


def test_a_prompt_that_cannot_run_ends_the_measurement() -> None:
    with pytest.raises(ConfigError, match="a prompt cannot run: too long"):
        speedup.run_conversations(Engine(error="too long"), [Conversation(prompt="a")], SAMPLING, 1)  # type: ignore[arg-type]


PLAIN = SideReport(
    name="autoregressive",
    algorithm=None,
    engine_dir="",
    num_draft_tokens=0,
    temperature=0.0,
    num_prompts=30,
    mean_prompt_tokens=8.0,
    output_tok_per_s=111.1,
    speedup=1.0,
    speedup_interval=Interval(low=1.0, high=1.0),
    speedup_by_round=(1.0, 1.0),
    acceptance=None,
    acceptance_ratio=None,
    acceptance_ratio_interval=None,
    acceptance_by_category={},
    acceptance_by_context_len={},
    specdec_bench_acceptance_length=None,
    num_texts=30,
    num_equal_texts=30,
    distinct_4gram_fraction=0.5,
)


def accepted(length: float, error: float = 0.0) -> Acceptance:
    return Acceptance(
        num_verify_steps=9,
        length=length,
        length_interval=Interval(low=length - error, high=length + error),
        by_position=(0.75, 0.5),
        by_position_interval=(Interval(low=0.5, high=1.0), Interval(low=0.25, high=0.75)),
    )


DRAFTED = replace(
    PLAIN,
    name="mine",
    algorithm="dflash",
    num_draft_tokens=2,
    output_tok_per_s=222.2,
    speedup=2.0,
    speedup_interval=Interval(low=1.75, high=2.25),
    speedup_by_round=(1.5, 2.5),
    acceptance=accepted(3.25, 0.25),
    acceptance_ratio=1.0,
    acceptance_ratio_interval=Interval(low=1.0, high=1.0),
    acceptance_by_category={"math": accepted(3.5), "prose": accepted(3.0)},
    acceptance_by_context_len={"64-127": accepted(3.25)},
    specdec_bench_acceptance_length=3.125,
    num_equal_texts=29,
    distinct_4gram_fraction=0.875,
)
OTHER = replace(
    DRAFTED,
    name="other",
    acceptance=accepted(2.6, 0.25),
    acceptance_ratio=0.8,
    acceptance_ratio_interval=Interval(low=0.7, high=1.1),
)


@pytest.fixture
def measured(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`bench speedup` of measured reports; floors need an engine."""
    (root / "machine.json").write_text(MACHINE.text())
    found = [replace(report, engine_dir=str(root / "dflash")) for report in (PLAIN, DRAFTED, OTHER)]
    monkeypatch.setattr(speedup, "compare", lambda *arguments, **options: found)

    def measure(*options: object, engines: tuple[str, ...] = ("mine=dflash", "other=dflash")) -> Result:
        sources = [name.replace("=", f"={root}/") for name in engines]
        more = ("--input-file", root / "prompts.jsonl", "--machine", root / "machine.json", *options)
        return run("bench", "speedup", *sources, *more)

    return measure


def test_the_text_says_each_number_with_its_unit(measured: Callable[..., Result]) -> None:
    result = measured("--max-new-tokens", 12, "--concurrency", 2, "--rounds", 2)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[:20] == [
        "tok/s speedup 95% interval by round",
        "autoregressive 111.1",
        "dflash, K = 2 (mine) 222.2 2.00x 1.75 to 2.25 1.50 2.50",
        "dflash, K = 2 (other) 222.2 2.00x 1.75 to 2.25 1.50 2.50",
        "",
        "dflash, K = 2 (mine)",
        "acceptance length 3.25 tokens per verify step, bonus included (95% interval over prompts: 3.00 to 3.50)",
        "by specdec_bench 3.12 tokens per step, the prefill's first token a step of 1, mean over requests",
        "acceptance length by category: math 3.50 (3.50 to 3.50), prose 3.00 (3.00 to 3.00)",
        "acceptance length by context length: 64-127 3.25 (3.25 to 3.25)",
        "accepted by draft position 1: 0.75 2: 0.50",
        "equal texts 29 of 30",
        "distinct 4-grams 0.88 of all",
        "",
        "dflash, K = 2 (other)",
        "acceptance length 2.60 tokens per verify step, bonus included (95% interval over prompts: 2.35 to 2.85)",
        "0.800 times the first drafter's (0.70 to 1.10)",
        *lines[17:20],
    ]
    assert sum(": floor of a step (2 x 14 tokens" in line for line in lines) == 3
    assert (
        "workload: 3 rows of prompts.jsonl, 12 new tokens each, 2 at a time, temperature 0, median of 2 rounds" in lines
    )


def test_what_the_prompts_are_too_few_to_say_is_a_warning(measured: Callable[..., Result]) -> None:
    assert speedup.sample_warnings([replace(PLAIN, num_prompts=9)])[0].startswith("9 prompts are too few")
    assert speedup.sample_warnings([PLAIN, replace(DRAFTED, acceptance=accepted(3.25, 0.1))]) == []
    warnings = [line for line in measured().stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: dflash, K = 2 (mine): the acceptance length is known within 8%; about 72 prompts would give 5%",
        "warning: dflash, K = 2 (other): the acceptance length is known within 10%; about 111 prompts would give 5%",
        "warning: dflash, K = 2 (other): these prompts do not tell its acceptance length from the first drafter's "
        "(ratio 0.70 to 1.10)",
    ]


def test_a_drafter_that_accepts_less_than_the_first_misses_the_gate(measured: Callable[..., Result]) -> None:
    passed, missed = (measured("--min-acceptance-ratio", bound) for bound in (0.8, 0.81))
    assert (passed.exit_code, missed.exit_code) == (0, 3)
    assert "gate min_acceptance_ratio, other (at least 0.8): 0.8 passed" in passed.stdout
    assert "gate min_acceptance_ratio, other (at least 0.81): 0.8 FAILED" in missed.stdout
    alone = measured("--min-acceptance-ratio", 0.8, engines=("mine=dflash",))
    assert alone.exit_code == 2 and "--min-acceptance-ratio: expected --baseline, or several engines" in alone.stderr


def test_a_report_is_the_baseline_of_a_later_one(measured: Callable[..., Result], tmp_path: Path) -> None:
    told = json.loads(measured("--json").stdout)
    told["reports"][1]["acceptance"]["length"] = 3.5
    path = tmp_path / "before.json"
    path.write_text(json.dumps(told))
    missed = measured("--baseline", path, "--min-acceptance-ratio", 0.95)
    assert missed.exit_code == 3
    assert f"mine: acceptance length 0.929 times that of {path}" in missed.stdout
    assert "other (at least 0.95): 1 passed" in missed.stdout and "mine (at least 0.95): 0.9286 FAILED" in missed.stdout
    assert measured("--baseline", path, "--min-acceptance-ratio", 0.9, engines=("mine=dflash",)).exit_code == 0
    document = json.loads(measured("--baseline", path, "--min-acceptance-ratio", 0.9, "--json").stdout)
    assert document["baseline_ratios"] == {"mine": pytest.approx(3.25 / 3.5), "other": 1.0}
    assert [gate["has_passed"] for gate in document["gates"]] == [True, True]


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (lambda told: told.pop("reports"), [], "a report that `bench speedup --json` printed"),
        (lambda told: told["reports"].pop(1), [], "expected mine, found other. Name engines"),
        (lambda told: None, ["--max-new-tokens", "5"], "max_new_tokens: expected 128, as in"),
        (lambda told: None, ["--num-prompts", "2"], "prompts_sha256: expected"),
        (lambda told: None, ["--temperature", "0.5"], "expected mine, T = 0.5, other, T = 0.5, found mine, other"),
        (
            lambda told: None,
            ["--temperature", "0", "--temperature", "0.5"],
            "expected mine, T = 0.5, other, T = 0.5, found mine, other",
        ),
    ],
)
def test_a_baseline_of_something_else_is_refused(change, words, message, measured, tmp_path: Path) -> None:
    told = json.loads(measured("--json").stdout)
    change(told)
    path = tmp_path / "before.json"
    path.write_text(json.dumps(told))
    result = measured("--baseline", path, *words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_the_table_and_the_figure_have_every_side(measured: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    table, figure = tmp_path / "t.csv", tmp_path / "f.svg"
    assert measured("--csv", table, "--figure", figure).exit_code == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["acceptance_length"] for row in rows] == ["", "3.25", "2.6"]
    assert rows[1]["acceptance_by_position_interval_2_low"] == "0.25"
    assert rows[1]["acceptance_by_category_math_length"] == "3.5"
    texts = [element.text for element in ElementTree.parse(figure).getroot().iter("{http://www.w3.org/2000/svg}text")]
    for expected in ("mine: acceptance length 3.25", "other: acceptance length 2.60", "math", "context 64-127", "75%"):
        assert expected in texts
    assert texts.count("75%") == 8, "four rows of two drafters"
    wrong = measured("--figure", tmp_path / "f.pdf")
    assert wrong.exit_code == 2 and "ends with .png or .svg" in wrong.stderr


def test_two_engines_of_one_name_are_refused(measured: Callable[..., Result]) -> None:
    for engines in (("a=dflash", "a=eagle3"), ("autoregressive=dflash",)):
        result = measured(engines=engines)
        assert result.exit_code == 2 and "engines: expected distinct names" in result.stderr


def test_a_figure_has_a_row_for_each_temperature_and_groups_of_the_first() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra 'figures'")
    hot = replace(
        DRAFTED,
        temperature=1.0,
        acceptance=accepted(2.0),
        acceptance_by_category={"math": accepted(1.25), "code": accepted(1.5)},
        acceptance_by_context_len={},
    )
    canvas = canvas_of([PLAIN, DRAFTED, OTHER, replace(PLAIN, temperature=1.0), hot], ())
    curves, mine, other = canvas.axes
    rows = [tick.get_text() for tick in mine.get_yticklabels()]
    assert rows == ["T = 0", "T = 1", "math", "prose", "context 64-127"]
    lengths = [text.get_text() for text in mine.texts if not text.get_text().endswith("%")]
    assert lengths == ["3.25", "2.00", "3.50", "3.00", "3.25"], "of each row, of greedy texts where it is a group"
    assert [text.get_text() for text in other.texts if not text.get_text().endswith("%")] == [
        "2.60",
        "3.50",
        "3.00",
        "3.25",
    ]
    assert [axes.get_title() for axes in (mine, other)] == ["mine", "other"]
    labels = [text.get_text() for text in curves.get_legend().get_texts()]
    assert labels == [
        "mine, T = 0: acceptance length 3.25",
        "other, T = 0: acceptance length 2.60",
        "mine, T = 1: acceptance length 2.00",
    ]
