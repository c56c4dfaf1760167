"""`bench throughput`: what it makes of its runs, and what it prints: runs with numbers chosen for it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dflash_trt.bench import throughput
from dflash_trt.bench.lockstep import LockstepReport
from dflash_trt.bench.roofline import Roofline
from dflash_trt.bench.throughput import PolicyReport, PolicySpeed, best_lengths, mixed_work
from dflash_trt.cli.main import cli
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from tests.scheduler.driver import make_limits

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


def test_mixed_work_has_many_short_and_few_long_answers() -> None:
    work = mixed_work(["a", "b", "c"], 600, 90)
    assert [item.prompt for item in work[:4]] == ["a", "b", "c", "a"]
    lengths = [item.sampling.max_new_tokens for item in work]
    assert min(lengths) >= 1 and 80 < max(lengths) <= 90
    assert sum(lengths) / 600 == pytest.approx(30, rel=0.1)
    assert all(item.sampling.ignore_eos for item in work)
    assert work == mixed_work(["a", "b", "c"], 600, 90)


def side(speed: float, length: float | None = None) -> LockstepReport:
    return LockstepReport(num_output_tokens=int(speed * 2), elapsed_s=2.0, acceptance_length=length)


def engine_that_drafts(most: int) -> Any:
    limits, models = SimpleNamespace(max_draft_len=most), SimpleNamespace(mapping=Mapping())
    return SimpleNamespace(manifest=SimpleNamespace(build_config=limits, pretrained_config=models))


def test_the_best_fixed_length_is_best_by_its_median_and_adaptive_is_compared_with_it() -> None:
    runs = [
        {"K = 0": side(10), "K = 3": side(20, 2.0), "adaptive": side(30, 2.5)},
        {"K = 0": side(99), "K = 3": side(20, 2.0), "adaptive": side(40, 2.5)},
        {"K = 0": side(10), "K = 3": side(20, 3.0), "adaptive": side(10, 3.5)},
    ]
    assert throughput._report(5, runs, {"K = 0": 0, "K = 3": 3}) == PolicyReport(
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
    lines: list[tuple[int, int]] = []
    config = RuntimeConfig(num_threads=4, ngram=True)

    class Sides:
        def __init__(
            self, executor: Any, policies: dict[str, Any], reader: Any, *, num_ranks: int, ngram: bool
        ) -> None:
            assert ngram and num_ranks == 1
            made.append(policies)

        def run(self, work: Any, *, concurrency: int) -> Any:
            works.append(len(work))
            return {name: side(10.0 * len(works)) for name in made[-1]}

        def close(self) -> None: ...

    executor = SimpleNamespace(limits=make_limits(max_draft_len=most), has_queue=False, close=lambda: None)
    monkeypatch.setattr(throughput, "Lockstep", Sides)
    monkeypatch.setattr(throughput, "EngineDir", SimpleNamespace(open=lambda path: engine_that_drafts(most)))
    monkeypatch.setattr(
        throughput, "open_executor", lambda engine, config, **options: opened.append((config, options)) or executor
    )
    monkeypatch.setattr(throughput, "prompt_reader", lambda engine: None)
    report, other = throughput.compare_policies(
        Path("dir"),
        ["a"],
        concurrencies=(2, 5),
        fixed_lengths=fixed,
        num_rounds=2,
        requests_per_client=3,
        max_new_tokens=9,
        config=config,
        progress=lambda number, of, text: lines.append((number, of)),
    )
    assert lines == [(number, 6) for number in range(1, 7)]
    assert list(made[0]) == [*(f"K = {length}" for length in expected), "adaptive"]
    asked = config.replaced(adaptive_draft_length=True)
    assert opened == [(asked, {"draft_lens": (*expected, *AdaptiveDraftLength(most).lengths)})]
    assert works == [6] * 3 + [15] * 3 and (report.concurrency, other.concurrency) == (2, 5)
    assert {speed.output_tok_per_s for speed in report.speeds} == {25.0}, "the first of three runs does not count"
    assert {speed.output_tok_per_s for speed in other.speeds} == {55.0}


def printed(monkeypatch, tmp_path: Path, target: str, report: Any, *words: str) -> tuple[str, Any]:
    """What a bench command prints of a report, as text and as JSON. Floors have tests of their own."""
    monkeypatch.setattr(target, lambda *arguments, **options: report)
    roofs = SimpleNamespace(beside=lambda *_, **__: ROOF, fixed_drafts=lambda _: ROOF.num_draft_tokens)
    monkeypatch.setattr("dflash_trt.cli.bench_throughput.roofs_of", lambda *_: roofs)
    monkeypatch.setattr("dflash_trt.cli.bench_throughput.context_len_of", lambda *_: ROOF.context_len)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    words = tuple(word.replace("ROWS", str(rows)) for word in words)
    text, document = (CliRunner().invoke(cli, ["bench", *words, *more]) for more in ([], ["--json"]))
    assert (text.exit_code, document.exit_code) == (0, 0), text.output
    return re.sub(r" +", " ", text.stdout), json.loads(document.stdout)


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
    words = ("throughput", "dir", "--input-file", "ROWS")
    text, _ = printed(monkeypatch, tmp_path, "dflash_trt.bench.throughput.compare_policies", [report], *words)
    assert text.startswith(
        " 4 clients tok/s K = 0: 11 adaptive: 33 | adaptive / best fixed (K = 0) 2.982 (2.50 3.50)\n"
        f" {ROOF_LINE}\n {ROOF_LINE}\n"
        "draft_length: --draft-length 0, the best fixed K by requests\nhardware: "
    )
    loads = ((64, 3), (4, 5), (1, 5), (16, 5))
    reports = [replace(report, concurrency=number, best_fixed_length=length) for number, length in loads]
    assert best_lengths(reports) == {1: 5, 64: 3}, "as `draft_length` of a runtime takes it"
    again = [*reports, replace(report, concurrency=99, best_fixed_length=5)]
    assert best_lengths(again) == {1: 5, 64: 3, 99: 5}
    assert RuntimeConfig(draft_length=best_lengths(reports)).draft_length == {1: 5, 64: 3}
