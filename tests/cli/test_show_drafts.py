"""`show-drafts`: the texts of a trace as `run --show-drafts` prints them."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke

STEP = {"id": 1, "step": 0, "num_candidates": 0, "num_accepted": 0, "token_ids": [1], "draft_token_ids": []}
WORDS = ["--max-new-tokens", "12", "--ignore-eos", "--draft-length", "3"]


def test_a_trace_is_shown_as_the_run_would_have_been(engine_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    prompts, trace = ["--prompt", "def f", "--prompt", "x"], tmp_path / "trace.jsonl"
    run = invoke("run", engine_dir, *prompts, *WORDS, "--show-drafts", "--trace-file", trace)
    shown = invoke("show-drafts", engine_dir, trace)
    assert (shown.exit_code, shown.stdout) == (0, run.stdout)
    assert shown.stdout.startswith("[1] ") and "[-" in shown.stdout


def test_a_text_alone_is_shown_without_a_name(engine_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    run = invoke("run", engine_dir, "--prompt", "def f", *WORDS, "--show-drafts", "--trace-file", tmp_path / "trace")
    assert invoke("show-drafts", engine_dir, tmp_path / "trace").stdout == run.stdout
    assert not run.stdout.startswith("[1]")


def test_samples_are_named(engine_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    words = ["--prompt", "x", "--n", "2", "--temperature", "0.8", "--seed", "1", *WORDS]
    run = invoke("run", engine_dir, *words, "--show-drafts", "--trace-file", tmp_path / "trace")
    assert run.stdout.startswith("[sample 0] ")
    shown = invoke("show-drafts", engine_dir, tmp_path / "trace")
    assert shown.stdout == run.stdout.replace("[sample", "[1, sample")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "line 1: expected a step of a trace, found"),
        (json.dumps(STEP) + "\n[]", "line 2: expected a step of a trace, found"),
        (json.dumps(STEP | {"num_accepted": -1}), "line 1: expected a step of a trace, found"),
        (json.dumps(STEP | {"num_accepted": True}), "line 1: expected a step of a trace, found"),
        (json.dumps(STEP | {"token_ids": [1.5]}), "line 1: expected token_ids, a list of token ids, found"),
        (json.dumps(STEP | {"draft_token_ids": None}), "line 1: expected draft_token_ids, a list of token ids, found"),
    ],
)
def test_what_is_no_trace_with_drafts_is_refused(
    engine_dir: Path, tmp_path: Path, invoke: Invoke, content: str, found: str
) -> None:
    (tmp_path / "trace").write_text(content)
    refused = invoke("show-drafts", engine_dir, tmp_path / "trace")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert found in refused.stderr and "--trace-file" in refused.stderr


def test_a_missing_trace_is_named(engine_dir: Path, tmp_path: Path, invoke: Invoke) -> None:
    refused = invoke("show-drafts", engine_dir, tmp_path / "none")
    assert refused.exit_code == 2 and "none: expected a trace of `run`, found No such file" in refused.stderr
