"""A run with --output-file that ends early keeps its finished rows, and --resume runs the others."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dflash_trt.cli.main import cli
from dflash_trt.cli.partial_results import PartialResults, partial_results
from dflash_trt.cli.prompts import InputRow, Job
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.request import FinishReason, GenerationOutput, SamplingParams
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.serving.generation_batch import output_without_tokens
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.stream import joined_output

DFLASH_TRT = [sys.executable, "-m", "dflash_trt.cli.main"]
# One K: results count drafts, and the default follows the clock.
SAMPLED = ["--temperature", "1", "--seed", "3", "--ignore-eos", "--draft-length", "3"]
MEASURED = {"time_to_first_token_s", "total_s"}


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each `generate` of the commands in this process was given."""
    counts: list[int] = []
    generate = LLM.generate

    def counted(self: LLM, prompts: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(len(prompts))
        return generate(self, prompts, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", counted)
    return counts


class Case:
    """Six rows of different lengths, so that they do not finish in their order; the fourth is refused."""

    def __init__(self, engine_dir: Path, root: Path) -> None:
        self.source, self.output = root / "in.jsonl", root / "out.jsonl"
        self.partial, self.trace = root / "out.jsonl.partial", root / "trace.jsonl"
        self.rows = [{"prompt": "def f", "max_new_tokens": count} for count in (30, 2, 9, 0, 5, 12)]
        self.words = ["run", engine_dir, "--input-file", self.source, "--output-file", self.output, *SAMPLED]
        self.write()

    def write(self) -> None:
        self.source.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def run(self, *more: str | Path) -> Any:
        return CliRunner().invoke(cli, [str(word) for word in (*self.words, *more)])

    def expected(self) -> list[dict[str, Any]]:
        """The results of a run without an interruption."""
        assert self.run().exit_code == 3  # the row that is refused
        rows = self.results()
        self.output.unlink()
        return rows

    def results(self) -> list[dict[str, Any]]:
        lines = self.output.read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name not in MEASURED} for line in lines]

    def names(self) -> set[str]:
        return {path.name for path in self.source.parent.iterdir()}


@pytest.fixture
def case(engine_dir: Path, tmp_path: Path) -> Case:
    return Case(engine_dir, tmp_path)


@pytest.fixture
def interrupt_after() -> Callable[..., Any]:
    """Run a case until so many rows are kept; then comes Ctrl-C."""

    def run(case: Case, count: int, *more: str | Path) -> Any:
        add, left = PartialResults.add, iter(range(count))

        def failing(self: PartialResults, *arguments: Any, **options: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            add(self, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialResults, "add", failing)
            result = case.run(*more)
        assert result.exit_code == 130
        return result

    return run


def test_a_resumed_run_gives_what_one_run_gives_and_runs_no_row_twice(
    case: Case, interrupt_after: Any, rows_run: list[int]
) -> None:
    expected = case.expected()
    case.output.write_text("old results\n")
    interrupted = interrupt_after(case, 2, "--overwrite")
    assert f"{case.partial}: 2 of 6 rows kept; repeat the command with --resume to continue" in interrupted.stderr
    assert case.output.read_text() == "old results\n"
    assert case.names() == {"in.jsonl", "out.jsonl", "out.jsonl.partial"}
    resumed = case.run("--resume")
    assert f"{case.partial}: 2 of 6 rows have a result" in resumed.stderr
    assert "4 requests (1 failed)" in resumed.stderr
    assert resumed.exit_code == 3  # the refused row, again
    assert rows_run == [5, 5, 3]
    assert case.results() == expected
    assert [row["id"] for row in expected] == [1, 2, 3, 4, 5, 6]
    assert case.names() == {"in.jsonl", "out.jsonl"}


def test_an_interrupt_before_the_first_row_leaves_nothing(case: Case, interrupt_after: Any) -> None:
    assert "kept" not in interrupt_after(case, 0).stderr
    assert case.names() == {"in.jsonl"}


def test_a_row_that_the_engine_refuses_is_not_for_another_run(case: Case) -> None:
    case.rows = [{"prompt": "def f"}, {"prompt": "x" * 200}]
    case.write()
    ran = case.run()
    assert ran.exit_code == 3 and "--resume" not in ran.stderr
    assert case.names() == {"in.jsonl", "out.jsonl"}


def test_the_trace_of_a_resumed_run_is_whole(case: Case, interrupt_after: Any) -> None:
    assert case.run("--trace-file", case.trace).exit_code == 3
    expected = case.trace.read_text()
    case.trace.unlink()
    interrupt_after(case, 3, "--trace-file", case.trace, "--overwrite")
    assert case.names() == {"in.jsonl", "out.jsonl", "out.jsonl.partial"}
    assert "--resume: trace" in case.run("--resume").stderr
    assert case.run("--trace-file", case.trace, "--resume").exit_code == 3
    assert case.trace.read_text() == expected


def test_every_cut_of_the_partial_file_resumes_to_the_same_results(case: Case, interrupt_after: Any) -> None:
    """A crash may leave any number of bytes. Whole lines are kept, the rest is run again."""
    expected = case.expected()
    interrupt_after(case, 4)
    whole = case.partial.read_bytes()
    ends = [0, *(offset + 1 for offset, byte in enumerate(whole) if byte == ord("\n"))]
    assert len(ends) == 6  # the settings and four rows
    for cut in (0, 9, ends[1] - 1, ends[1], ends[2] - 1, ends[3] + 40, ends[5] - 1):
        case.partial.write_bytes(whole[:cut])
        case.output.unlink(missing_ok=True)
        result = case.run("--resume")
        num_kept = max(0, sum(end <= cut for end in ends[1:]) - 1)
        assert f"{num_kept} of 6 rows have a result" in result.stderr
        assert result.exit_code == 3  # the row that is refused
        assert case.results() == expected
    case.partial.write_bytes(whole + b"\0" * 4096)  # what a file system may leave after a power cut
    case.output.unlink()
    result = case.run("--resume")
    assert result.exit_code == 3 and "4 of 6 rows have a result" in result.stderr
    assert case.results() == expected


def test_a_partial_file_is_never_thrown_away_unasked(case: Case, interrupt_after: Any) -> None:
    interrupt_after(case, 2)
    kept = case.partial.read_bytes()
    refused = case.run()
    assert refused.exit_code == 2
    assert "Pass --resume to run the other rows, or remove the file to start over." in refused.stderr
    assert case.partial.read_bytes() == kept


def test_other_settings_and_other_rows_are_refused_by_name(case: Case, interrupt_after: Any) -> None:
    interrupt_after(case, 3)
    kept = case.partial.read_bytes()
    result = case.run("--resume", "--temperature", "0.5", "--draft-length", "2")
    assert result.exit_code == 2
    assert "temperature: expected 1.0, as in the unfinished run, found 0.5" in result.stderr
    assert "draft_length: expected" in result.stderr and "as in the unfinished run" in result.stderr
    case.rows[1]["prompt"] = "def g"
    case.write()
    result = case.run("--resume")
    assert result.exit_code == 2
    assert "--resume: expected the rows of the unfinished run, found another input at rows 2." in result.stderr
    assert case.partial.read_bytes() == kept
    case.rows[1]["prompt"] = "def f"
    case.rows.append({"prompt": "more"})  # which changes nothing of the rows before
    case.write()
    assert "of 7 rows have a result" in case.run("--resume").stderr
    assert len(case.results()) == 7


def _kept(path: Path, rows: list[InputRow], outputs: dict[int, GenerationOutput]) -> None:
    partial = PartialResults(path, rows, {}, resumes=False)
    for index, output in outputs.items():
        partial.add(index, output, has_trace=False)
    partial.close()


def _output(*reasons: FinishReason) -> GenerationOutput:
    """Of a prompt with a sample for each reason."""
    samples = [replace(output_without_tokens("r", reason, text="x"), num_prompt_tokens=3) for reason in reasons]
    return joined_output(samples)


@pytest.mark.parametrize("num_changed", [1, 3, 4, 9])
def test_rows_that_changed_are_named_or_counted(tmp_path: Path, num_changed: int) -> None:
    rows: list[InputRow] = [Job(row_id=i, prompt="x", sampling=SamplingParams()) for i in range(10)]
    _kept(tmp_path / "p", rows, {i: _output("stop") for i in range(10)})
    changed = [replace(row, prompt="y") if i < num_changed else row for i, row in enumerate(rows)]
    with pytest.raises(ConfigError, match="another input at rows") as error:
        PartialResults(tmp_path / "p", changed, {}, resumes=True)
    named = {1: "rows 1.", 3: "rows 1, 2, 3.", 4: "rows 1, 2, 3 and 1 more.", 9: "rows 1, 2, 3 and 6 more."}
    assert named[num_changed] in str(error.value)


def test_a_row_is_finished_when_all_of_its_samples_are(tmp_path: Path) -> None:
    reasons: tuple[FinishReason, ...] = ("stop", "length", "error", "cancelled")
    rows: list[InputRow] = [Job(row_id=1, prompt="x", sampling=SamplingParams(n=2))]
    for number, pair in enumerate(product(reasons, repeat=2)):
        path = tmp_path / str(number)
        _kept(path, rows, {0: _output(*pair)})
        again = PartialResults(path, rows, {}, resumes=True)
        assert (0 in again.finished) == (set(pair) <= {"stop", "length"}), pair
        again.close()


def test_another_engine_is_refused_and_a_rebuilt_one_is_not(
    case: Case, target: Path, interrupt_after: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    interrupt_after(case, 2)
    other = tmp_path_factory.mktemp("other") / "engine"
    build = ["build", "--target", target, "-o", other, "--dtype", "float32", "--max-seq-len", "96"]
    assert CliRunner().invoke(cli, [str(word) for word in build]).exit_code == 0
    engine, case.words[1] = case.words[1], other
    assert "--resume: engine: expected" in case.run("--resume").stderr
    build += ["--drafter", target.with_name("drafter"), "--overwrite"]
    assert CliRunner().invoke(cli, [str(word) for word in build]).exit_code == 0
    assert engine != other
    assert case.run("--resume").exit_code == 3
    assert len(case.results()) == 6


def test_rows_that_failed_in_the_engine_are_kept_apart_and_run_again(case: Case, monkeypatch) -> None:
    """The final file has their errors; --resume replaces them."""
    from dflash_trt.backends.torch.executor import TorchExecutor

    expected = case.expected()
    submit = TorchExecutor.submit

    def failing(self: TorchExecutor, plan: StepPlan) -> Any:
        rows = plan.rows
        stored = self._slots.context_lens.numpy()[rows.slot_ids]
        lens = np.where(rows.context_lens < 0, stored, rows.context_lens)
        if (lens > 20).any():
            raise RuntimeError("the device failed on command")
        return submit(self, plan)

    monkeypatch.setattr(TorchExecutor, "submit", failing)
    failed = case.run()
    assert failed.exit_code == 3
    assert "repeat the command with --resume to retry 1 row" in failed.stderr
    assert [row["finish_reason"] for row in case.results()] == [
        "error",
        "length",
        "length",
        "error",
        "length",
        "length",
    ]
    monkeypatch.setattr(TorchExecutor, "submit", submit)
    assert "4 of 6 rows have a result" in case.run("--resume").stderr
    assert case.results() == expected
    assert case.names() == {"in.jsonl", "out.jsonl"}


def test_resuming_without_anything_to_resume_starts_or_says_so(case: Case) -> None:
    assert "0 of 6 rows have a result" in case.run("--resume").stderr
    assert len(case.results()) == 6
    result = case.run("--resume")
    assert result.exit_code == 2
    assert f"--resume: expected {case.partial}, found a finished {case.output} only" in result.stderr


def test_a_foreign_file_of_the_partial_files_name_is_left_alone(case: Case) -> None:
    for content in (b"mine", b'{"a": 1}\n{"b": 2}\n'):
        case.partial.write_bytes(content)
        result = case.run("--resume")
        assert result.exit_code == 2
        assert "expected results of an unfinished run, found another file" in result.stderr
        assert case.partial.read_bytes() == content


def test_a_damaged_line_among_good_ones_is_refused(case: Case, interrupt_after: Any) -> None:
    interrupt_after(case, 3)
    lines = case.partial.read_bytes().splitlines(keepends=True)
    case.partial.write_bytes(b"".join([*lines[:2], b'{"row": 1, "res\n', *lines[3:]]))
    assert "found line 3 that is no result" in case.run("--resume").stderr


def test_two_runs_do_not_share_a_partial_file(case: Case) -> None:
    with partial_results(case.output, None, [], {}, resumes=False):
        result = case.run("--resume")
    assert result.exit_code == 2
    assert "expected one run at a time, found another one" in result.stderr


def test_a_full_disk_keeps_whole_rows_and_the_old_results(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the file's size cuts a line in the middle, as a full disk does."""
    expected = case.expected()
    case.output.write_text("old results\n")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
    try:
        result = case.run("--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 1
    assert "expected a disk that takes the results, found File too large" in result.stderr
    assert "rows kept; repeat the command with --resume" in result.stderr
    assert "Traceback" not in result.stderr
    assert case.output.read_text() == "old results\n"
    assert case.partial.read_bytes().endswith(b"}\n")
    assert case.run("--resume").exit_code == 3
    assert case.results() == expected


def test_a_disk_that_is_full_at_the_end_keeps_all_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = case.expected()
    case.output.write_text("old results\n")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    result = case.run("--overwrite")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "5 of 6 rows kept" in result.stderr
    assert case.output.read_text() == "old results\n"
    assert case.names() == {"in.jsonl", "out.jsonl", "out.jsonl.partial"}
    monkeypatch.undo()
    assert case.run("--resume").exit_code == 3
    assert case.results() == expected


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_keeps_every_finished_row(engine_dir, tmp_path, number, exit_code) -> None:
    case = Case(engine_dir, tmp_path)
    case.rows = [{"prompt": "def f", "max_new_tokens": 2 * i + 4} for i in range(40)]
    case.write()
    command = [str(word) for word in (*DFLASH_TRT, *case.words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (case.partial.exists() and case.partial.read_bytes().count(b"\n") > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code, stderr
    assert "Traceback" not in stderr
    assert ("rows kept; repeat the command with --resume" in stderr) == (number != signal.SIGKILL)
    num_kept = case.partial.read_bytes().count(b"\n") - 1
    assert num_kept >= 3
    assert case.names() == {"in.jsonl", "out.jsonl.partial"}
    resumed = case.run("--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert f"{num_kept} of 40 rows have a result" in resumed.stderr
    longest = case.results()[-1]["token_ids"]
    assert [row["token_ids"] for row in case.results()] == [longest[: 2 * i + 4] for i in range(40)]
    assert [row["id"] for row in case.results()] == list(range(1, 41))
