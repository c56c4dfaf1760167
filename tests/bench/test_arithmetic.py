"""What the measurements make of their runs, and what their commands print: runs with numbers chosen for it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.bench import lockstep, serving_sweep, speculation
from dflash_trt.bench.lockstep import Lockstep, LockstepReport, PolicyReport, PolicySpeed, best_lengths
from dflash_trt.bench.roofline import Roofline
from dflash_trt.bench.serving_sweep import ConcurrencyReport
from dflash_trt.bench.soak import SoakReport
from dflash_trt.bench.speculation import SpeculationReport
from dflash_trt.bench.throughput import LoadReport, Work
from dflash_trt.cli.bench_options import print_reports
from dflash_trt.cli.main import cli
from dflash_trt.core.request import GenerationOutput, SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.serving.prompts import PromptReader
from tests.scheduler.driver import make_limits
from tests.serving.engines import VOCAB_SIZE, make_executor

SAMPLING = SamplingParams(max_new_tokens=20, ignore_eos=True)
ROOF = Roofline(
    label="side",
    machine="a machine",
    num_requests=5,
    context_len=40,
    num_draft_tokens=4,
    memory_floor_s=0.002,
    compute_floor_s=0.001,
    floor_s=0.002,
    floor_tok_per_s=1000.0,
    reached_fraction=0.25,
)
ROOF_LINE = "side: floor of a step (5 x 40 tokens, K = 4): memory 2 ms, compute 1 ms, 1000 tok/s; reached 25%"


def output(*token_ids: int, **fields: Any) -> GenerationOutput:
    counts = {"num_verify_steps": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "num_emitted_by_verify": 5}
    times = {"time_to_first_token_s": 0.5, "total_s": 2.0}
    values = {"request_id": "r", "text": None, "logprobs": (), "finish_reason": "length", "num_prompt_tokens": 1}
    return GenerationOutput(token_ids=token_ids, **(values | counts | times | fields))  # type: ignore[arg-type]


class Opened:
    """Takes the place of LLM: remembers how it was opened."""

    options: list[dict[str, Any]]

    def __init__(self, engine_dir: Path, config: RuntimeConfig, **options: Any) -> None:
        self.options.append(dict(config) | options)
        self.config = config if config.num_draft_tokens else config.model_copy(update={"num_draft_tokens": 3})

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def opened(monkeypatch) -> list[dict[str, Any]]:
    options: list[dict[str, Any]] = []
    fake = type("LLM", (Opened,), {"options": options})
    monkeypatch.setattr(speculation, "LLM", fake)
    monkeypatch.setattr(serving_sweep, "LLM", fake)
    return options


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_a_speedup_is_the_median_of_the_ratios_of_rounds_without_the_first(
    opened, monkeypatch, num_draft_tokens
) -> None:
    plain = [output(1, 2, 3, 4, 5), output(1, 1, 1, 1, 1)]
    drafted = [output(1, 2, 3, 4, 5), output(1, 1, 1, 1, 2, num_emitted_by_verify=9)]
    speeds = iter([1.0, 1000.0, 10.0, 30.0, 20.0, 20.0, 40.0, 100.0])
    runs = iter([plain, drafted] * 4)
    monkeypatch.setattr(speculation, "run_prompts", lambda *arguments: (next(runs), next(speeds)))
    lines: list[str] = []
    report = speculation.compare(
        Path("dir"),
        ["a", "b"],
        SAMPLING,
        config=RuntimeConfig(num_draft_tokens=num_draft_tokens, num_threads=4, device="cpu"),
        concurrency=5,
        num_rounds=3,
        progress=lines.append,
    )
    assert report == SpeculationReport(
        num_prompts=2,
        max_new_tokens=20,
        concurrency=5,
        num_rounds=3,
        num_draft_tokens=num_draft_tokens or 3,
        autoregressive_tok_per_s=20.0,
        speculative_tok_per_s=30.0,
        speedup=2.5,
        speedup_by_round=(3.0, 1.0, 2.5),
        acceptance_length=3.5,
        specdec_bench_acceptance_length=None,
        accepted_fraction_by_position=(),
        has_equal_tokens=False,
        num_equal_texts=1,
        distinct_4gram_fraction=1.0,
    )
    common = dict(RuntimeConfig(enable_prefix_caching=False, num_threads=4, device="cpu"))
    assert opened == [common | {"use_drafter": False}, common | {"num_draft_tokens": num_draft_tokens}] * 4
    assert lines[1] == "round 1: 10 tok/s plain, 30 tok/s speculative"


def test_a_run_warms_up_and_takes_so_many_prompts_at_a_time(monkeypatch) -> None:
    calls: list[tuple[int, int]] = []

    class Engine:
        def generate(self, prompts: list[str], sampling: SamplingParams) -> list[GenerationOutput]:
            calls.append((len(prompts), sampling.max_new_tokens))
            return [output(1, 2, 3) for _ in prompts]

    clock = iter([10.0, 14.0])
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: next(clock))
    outputs, speed = speculation.run_prompts(Engine(), list("abc"), SAMPLING, 2)  # type: ignore[arg-type]
    assert calls == [(2, 8), (2, 20), (1, 20)]
    assert (len(outputs), speed) == (3, 9 / 4)


def load(speed: float, first_token_s: float = 0.5, length: float = 2.0) -> LoadReport:
    return LoadReport(
        concurrency=2,
        num_requests=1,
        num_output_tokens=1,
        wall_time_s=1.0,
        output_tok_per_s=speed,
        mean_time_to_first_token_s=first_token_s,
        acceptance_length=length,
    )


def test_a_sweep_reports_the_plain_loop_and_both_ratios(monkeypatch) -> None:
    works: list[int] = []

    def batching(engine_dir: Path, config: RuntimeConfig, work: list[Work], *rest: Any) -> tuple[float, ...]:
        works.append(len(work))
        return (2.0, 5.0, 3.0)

    plain = [load(10, 0.1), load(30, 0.3), load(20, 0.2, 4.5)]
    monkeypatch.setattr(serving_sweep, "_batching", batching)
    monkeypatch.setattr(serving_sweep, "_loops", lambda *rest: (plain, [load(20, 9.0), load(45), load(25)]))
    options = {"num_rounds": 3, "requests_per_client": 4, "max_new_tokens": 9, "progress": print}
    first, second = serving_sweep.sweep(Path("dir"), ["a"], config=RuntimeConfig(), concurrencies=(2, 3), **options)  # type: ignore[arg-type]
    assert works == [8, 12]
    assert (first.concurrency, second.concurrency) == (2, 3)
    assert first == ConcurrencyReport(
        concurrency=2,
        output_tok_per_s=20,
        mean_time_to_first_token_s=0.2,
        acceptance_length=4.5,
        in_flight_to_static_batching=3.0,
        in_flight_to_static_batching_by_round=(2.0, 5.0, 3.0),
        overlapped_to_plain=1.5,
    )


def test_the_two_loops_alternate_without_prefix_reuse_and_the_first_round_does_not_count(opened, monkeypatch) -> None:
    speeds = iter([1.0, 2.0, 3.0, 4.0])
    clients: list[int] = []

    def run(engine: Any, work: Any, *, concurrency: int) -> LoadReport:
        clients.append(concurrency)
        return load(next(speeds))

    monkeypatch.setattr(serving_sweep, "run_in_flight", run)
    monkeypatch.setattr(serving_sweep, "EngineDir", SimpleNamespace(open=lambda path: engine_that_drafts(3)))
    config = RuntimeConfig(num_threads=4, kv_cache_bytes=5)
    plain, overlapped = serving_sweep._loops(Path("dir"), config, [], 2, 1, print)
    assert ([run.output_tok_per_s for run in plain], [run.output_tok_per_s for run in overlapped]) == ([3.0], [4.0])
    assert clients == [2] * 4
    turns = opened
    assert [turn["overlap_scheduling"] for turn in turns] == [False, True, False, True]
    assert not any(turn["enable_prefix_caching"] for turn in turns)
    assert {(turn["num_threads"], turn["kv_cache_bytes"]) for turn in turns} == {(4, 5)}
    policies = [turn["draft_length_policy"] for turn in turns]
    assert policies[0] is policies[2] is not policies[1] is policies[3]
    assert {policy.lengths for policy in policies} == {AdaptiveDraftLength(3).lengths}


def side(speed: float, length: float | None = None) -> LockstepReport:
    return LockstepReport(num_output_tokens=int(speed * 2), elapsed_s=2.0, acceptance_length=length)


def engine_that_drafts(most: int) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(build_config=SimpleNamespace(max_draft_len=most)))


def test_batching_in_flight_is_over_whole_batches_and_the_first_round_does_not_count(monkeypatch) -> None:
    runs = iter(
        [{"in flight": side(9), "static batching": side(1)}, {"in flight": side(30), "static batching": side(20)}]
    )
    made: list[Any] = []

    class Sides:
        def __init__(self, executor: Any, policies: Any, reader: Any, *, with_static_batching: Any) -> None:
            made.append((list(policies), with_static_batching))

        def run(self, work: Any, *, concurrency: int) -> Any:
            assert concurrency == 2
            return next(runs)

        def close(self) -> None: ...

    executor = SimpleNamespace(limits=make_limits(), close=lambda: None)
    monkeypatch.setattr(serving_sweep, "Lockstep", Sides)
    warmed: list[Any] = []
    monkeypatch.setattr(serving_sweep, "EngineDir", SimpleNamespace(open=lambda path: engine_that_drafts(3)))
    monkeypatch.setattr(
        serving_sweep,
        "open_executor",
        lambda engine, config, *, draft_lens: warmed.append((config, draft_lens)) or executor,
    )
    monkeypatch.setattr(serving_sweep, "prompt_reader", lambda engine: None)
    config = RuntimeConfig(num_threads=4)
    assert serving_sweep._batching(Path("dir"), config, [], 2, 1, print) == (1.5,)
    assert made == [(["in flight", "static batching"], {"static batching"})]
    assert warmed == [(config, AdaptiveDraftLength(3).lengths)]


def test_the_best_fixed_length_is_best_by_its_median_and_adaptive_is_compared_with_it() -> None:
    runs = [
        {"K = 0": side(10), "K = 3": side(20, 2.0), "adaptive": side(30, 2.5)},
        {"K = 0": side(99), "K = 3": side(20, 2.0), "adaptive": side(40, 2.5)},
        {"K = 0": side(10), "K = 3": side(20, 3.0), "adaptive": side(10, 3.5)},
    ]
    assert lockstep._report(5, runs, {"K = 0": 0, "K = 3": 3}) == PolicyReport(
        concurrency=5,
        speeds=(
            PolicySpeed(policy="K = 0", num_draft_tokens=0, output_tok_per_s=10, acceptance_length=None),
            PolicySpeed(policy="K = 3", num_draft_tokens=3, output_tok_per_s=20, acceptance_length=3.0),
            PolicySpeed(policy="adaptive", num_draft_tokens=None, output_tok_per_s=30, acceptance_length=3.5),
        ),
        best_fixed="K = 3",
        best_fixed_length=3,
        adaptive_to_best_fixed=1.5,
        adaptive_to_best_fixed_by_round=(1.5, 2.0, 0.5),
    )


@pytest.mark.parametrize(
    ("most", "fixed", "expected"), [(3, (), [0, 2, 3]), (7, (), [0, 2, 3, 4, 7]), (0, (), [0]), (7, (5, 1), [5, 1])]
)
def test_policies_are_the_fixed_lengths_that_the_engine_drafts_and_the_adaptive_one(
    monkeypatch, most, fixed, expected
) -> None:
    made: list[dict[str, Any]] = []
    opened: list[Any] = []
    works: list[int] = []
    config = RuntimeConfig(num_threads=4)

    class Sides:
        def __init__(self, executor: Any, policies: dict[str, Any], reader: Any) -> None:
            made.append(policies)

        def run(self, work: Any, *, concurrency: int) -> Any:
            works.append(len(work))
            return {name: side(10.0 * len(works)) for name in made[-1]}

        def close(self) -> None: ...

    executor = SimpleNamespace(limits=make_limits(max_draft_len=most), close=lambda: None)
    monkeypatch.setattr(lockstep, "Lockstep", Sides)
    monkeypatch.setattr(lockstep, "EngineDir", SimpleNamespace(open=lambda path: engine_that_drafts(most)))
    monkeypatch.setattr(
        lockstep, "open_executor", lambda engine, config, **options: opened.append((config, options)) or executor
    )
    monkeypatch.setattr(lockstep, "prompt_reader", lambda engine: None)
    (report,) = lockstep.compare_policies(
        Path("dir"),
        ["a"],
        concurrencies=(2,),
        fixed_lengths=fixed,
        num_rounds=2,
        requests_per_client=3,
        max_new_tokens=9,
        config=config,
        progress=lambda line: None,
    )
    assert list(made[0]) == [*(f"K = {length}" for length in expected), "adaptive"]
    assert opened == [(config, {"draft_lens": (*expected, *AdaptiveDraftLength(most).lengths)})]
    assert works == [6] * 3
    assert {speed.output_tok_per_s for speed in report.speeds} == {25.0}, "the first of three runs does not count"


def test_whole_batches_begin_when_the_last_of_the_ones_before_has_ended() -> None:
    """One long and three short requests, two at a time: in flight, the short ones pass beside the long one."""
    lengths = (12, 2, 2, 2)
    work = [
        Work(prompt={"prompt_token_ids": [5, i]}, sampling=SamplingParams(max_new_tokens=length))
        for i, length in enumerate(lengths)
    ]
    running: dict[int, list[frozenset[str]]] = {0: [], 1: []}
    executor = make_executor()
    num_pages = executor.limits.num_pages // 2

    class Recording:
        limits, has_queue, can_retry = executor.limits, False, True

        def submit(self, plan: Any) -> Any:
            half = int(plan.page_updates.page_ids[0]) // num_pages
            running[half].append(frozenset(plan.rows.request_ids))
            return executor.submit(plan)

    policies = {"in flight": FixedDraftLength(0), "whole": FixedDraftLength(0)}
    sides = Lockstep(Recording(), policies, PromptReader(None, vocab_size=VOCAB_SIZE), with_static_batching={"whole"})
    sides.run(work, concurrency=2)
    sides.close()
    in_flight, whole = running.values()
    assert max(map(len, in_flight + whole)) == 2
    assert {"0", "2"} in in_flight and {"0", "3"} in in_flight
    assert all(not (step & {"0", "1"} and step & {"2", "3"}) for step in whole)
    assert {"2", "3"} in whole


def printed(monkeypatch, tmp_path: Path, target: str, report: Any, *words: str) -> tuple[str, Any]:
    """What a bench command prints of a report, as text and as JSON. Floors have tests of their own."""
    monkeypatch.setattr(target, lambda *arguments, **options: report)
    roofs = SimpleNamespace(beside=lambda *_, **__: ROOF, fixed_drafts=lambda _: ROOF.num_draft_tokens)
    monkeypatch.setattr("dflash_trt.cli.bench.roofs_of", lambda *_: roofs)
    monkeypatch.setattr("dflash_trt.cli.bench.context_len_of", lambda *_: ROOF.context_len)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    words = tuple(word.replace("ROWS", str(rows)) for word in words)
    text, document = (CliRunner().invoke(cli, ["bench", *words, *more]) for more in ([], ["--json"]))
    assert (text.exit_code, document.exit_code) == (0, 0), text.output
    return re.sub(r" +", " ", text.stdout), json.loads(document.stdout)


def test_the_text_of_a_speedup_says_each_number_with_its_unit(monkeypatch, tmp_path) -> None:
    report = SpeculationReport(
        num_prompts=3,
        max_new_tokens=20,
        concurrency=5,
        num_rounds=7,
        num_draft_tokens=4,
        autoregressive_tok_per_s=111.1,
        speculative_tok_per_s=222.2,
        speedup=2.0,
        speedup_by_round=(1.5, 2.5),
        acceptance_length=3.25,
        specdec_bench_acceptance_length=3.125,
        accepted_fraction_by_position=(0.75, 0.5),
        has_equal_tokens=False,
        num_equal_texts=2,
        distinct_4gram_fraction=0.875,
    )
    text, document = printed(
        monkeypatch, tmp_path, "dflash_trt.bench.speculation.compare", report, "speedup", "dir", "--input-file", "ROWS"
    )
    assert text.splitlines() == [
        "3 prompts, 20 new tokens each, 5 at a time, median of 7 rounds",
        "autoregressive 111.1 tok/s",
        "speculative, K = 4 222.2 tok/s",
        "speedup 2.00 x (rounds: 1.50, 2.50)",
        "acceptance length 3.25 tokens per verify step, bonus included",
        "by specdec_bench 3.12 tokens per step, the prefill's first token a step of 1, mean over requests",
        "accepted by draft position: 1: 0.75 2: 0.50",
        "equal texts: 2 of 3",
        "distinct 4-grams: 0.88 of all",
        ROOF_LINE,
        ROOF_LINE,
    ]
    assert (document["speedup"], document["autoregressive_tok_per_s"]) == (2.0, 111.1)


def test_the_text_of_a_sweep_says_each_number_with_its_unit(monkeypatch, tmp_path) -> None:
    report = ConcurrencyReport(
        concurrency=4,
        output_tok_per_s=321.4,
        mean_time_to_first_token_s=0.0625,
        acceptance_length=2.0,
        in_flight_to_static_batching=1.25,
        in_flight_to_static_batching_by_round=(1.2, 1.3),
        overlapped_to_plain=1.75,
    )
    words = ("serving", "dir", "--input-file", "ROWS")
    text, _ = printed(monkeypatch, tmp_path, "dflash_trt.bench.serving_sweep.sweep", [report], *words)
    assert text == (
        " 4 clients 321 tok/s, first token after 62 ms | in-flight / static batching 1.25 (1.20 1.30)"
        f" | overlapped / plain loop 1.75\n {ROOF_LINE}\n"
    )


def test_floors_stand_below_their_own_report(capsys) -> None:
    floors = [[replace(ROOF, label=name)] for name in ("first", "second")]
    print_reports([1, 2], str, as_json=False, rooflines=floors)
    printed_lines = [line.split(": floor")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert printed_lines == ["1", "first", "2", "second"]


def test_the_text_of_a_comparison_of_policies_names_the_best(monkeypatch, tmp_path) -> None:
    speeds = tuple(
        PolicySpeed(policy=name, num_draft_tokens=None, output_tok_per_s=speed, acceptance_length=None)
        for name, speed in (("K = 0", 11.2), ("adaptive", 33.4))
    )
    report = PolicyReport(
        concurrency=4,
        speeds=speeds,
        best_fixed="K = 0",
        best_fixed_length=0,
        adaptive_to_best_fixed=2.982,
        adaptive_to_best_fixed_by_round=(2.5, 3.5),
    )
    words = ("draft-length", "dir", "--input-file", "ROWS")
    text, _ = printed(monkeypatch, tmp_path, "dflash_trt.bench.lockstep.compare_policies", [report], *words)
    assert text == (
        " 4 clients tok/s K = 0: 11 adaptive: 33 | adaptive / best fixed (K = 0) 2.982 (2.50 3.50)\n"
        f" {ROOF_LINE}\n {ROOF_LINE}\n"
        "draft_length: --draft-length 1:0, the best fixed K by requests\n"
    )
    loads = ((64, 3), (4, 5), (1, 5), (16, 5))
    reports = [replace(report, concurrency=number, best_fixed_length=length) for number, length in loads]
    assert best_lengths(reports) == {1: 5, 64: 3}, "as `draft_length` of a runtime takes it"
    assert RuntimeConfig(draft_length=best_lengths(reports)).draft_length == {1: 5, 64: 3}


def test_the_text_of_a_soak_says_what_became_of_every_request(monkeypatch, tmp_path) -> None:
    report = SoakReport(
        duration_s=12.4,
        num_sent=30,
        num_by_outcome={"length": 20, "cancelled": 10},
        num_output_tokens=400,
        num_preemptions=5,
        prefix_hit_fraction=0.375,
        num_leaked_pages=0,
    )
    llm = type("LLM", (Opened,), {"options": [], "engine": SimpleNamespace(manifest=SimpleNamespace())})
    llm.engine.manifest.build_config = SimpleNamespace(max_draft_len=3)
    llm.engine.manifest.target = SimpleNamespace(vocab_size=9)
    llm.page_plan = SimpleNamespace(bytes_per_token=10, max_seq_len=100)
    monkeypatch.setattr("dflash_trt.serving.llm.LLM", llm)
    text, document = printed(monkeypatch, tmp_path, "dflash_trt.bench.soak.soak", report, "soak", "dir")
    assert text.splitlines() == [
        "30 requests in 12 s: 10 cancelled, 20 length",
        "400 tokens, 5 preemptions, prefix hits 0.38 of prompt tokens, leaked pages: 0",
    ]
    assert document["num_preemptions"] == 5
    assert llm.options[1]["kv_cache_bytes"] == 2000
    assert llm.options[1]["max_queue_len"] == 64
    assert llm.options[1]["adaptive_draft_length"]
