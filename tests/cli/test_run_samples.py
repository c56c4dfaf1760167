"""`run` with several samples of a prompt, and with log probabilities beside those of the output."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.prompts import Job
from dflash_trt.cli.run import _failure
from dflash_trt.core.request import SamplingParams
from dflash_trt.serving.generation_batch import output_without_tokens

WORDS = ["--max-new-tokens", "8", "--ignore-eos", "--temperature", "0.9", "--seed", "3"]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_sample_has_a_row_with_its_index(engine_dir, tmp_path, invoke) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"id": "a", "prompt": "def f", "n": 3}, {"id": "b", "prompt": "def f"})
    files = ["--input-file", rows, "--output-file", tmp_path / "out.jsonl", "--trace-file", tmp_path / "trace.jsonl"]
    result = invoke("run", engine_dir, *files, *WORDS)
    assert result.exit_code == 0, result.stderr
    results = rows_of(tmp_path / "out.jsonl")
    assert [(row["id"], row.get("sample_index")) for row in results] == [("a", 0), ("a", 1), ("a", 2), ("b", None)]
    assert results[0]["token_ids"] == results[3]["token_ids"]
    assert len({tuple(row["token_ids"]) for row in results}) == 3
    assert "4 requests" in result.stderr
    traced = {(line["id"], line.get("sample_index")) for line in rows_of(tmp_path / "trace.jsonl")}
    assert traced == {("a", 0), ("a", 1), ("a", 2), ("b", None)}


def test_a_run_that_goes_on_keeps_all_samples_of_a_row(engine_dir, tmp_path, invoke) -> None:
    rows = write_rows(tmp_path / "in.jsonl", {"prompt": "def f", "n": 2}, {"prompt": "x", "n": 2}, {"prompt": "y"})
    words = ["run", engine_dir, "--input-file", rows, *WORDS]
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert invoke(*words, "--output-file", whole).exit_code == 0
    assert invoke(*words, "--output-file", cut).exit_code == 0
    header = {"format": "dflash-trt partial results 1"}
    partial = cut.with_name("cut.jsonl.partial")
    with pytest.MonkeyPatch.context() as patch:  # a crash before the file is complete
        patch.setattr("dflash_trt.cli.partial_results.PartialResults.publish", _crash)
        cut.unlink()
        invoke(*words, "--output-file", cut)
    lines = partial.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[0]).items() >= header.items()
    partial.write_bytes(b"".join(lines[:2]))  # one row is finished, with both of its samples
    resumed = invoke(*words, "--output-file", cut, "--resume")
    assert resumed.exit_code == 0 and "1 of 3 rows have a result" in resumed.stderr
    kept = [(row["id"], row.get("sample_index"), row["token_ids"]) for row in rows_of(cut)]
    assert kept == [(row["id"], row.get("sample_index"), row["token_ids"]) for row in rows_of(whole)]
    assert [index for _, index, _ in kept] == [0, 1, 0, 1, None]


def _crash(*_: object) -> None:
    raise KeyboardInterrupt


def test_printed_samples_are_labelled(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "def f", "--n", "2", *WORDS)
    assert result.exit_code == 0
    assert result.stdout.startswith("[sample 0] ") and "\n[sample 1] " in result.stdout
    result = invoke("run", engine_dir, "--prompt", "a", "--prompt", "b", "--n", "2", *WORDS)
    assert result.stdout.startswith("[1, sample 0] ") and "\n[2, sample 1] " in result.stdout


def test_log_probabilities_are_fields_of_the_row(engine_dir, invoke) -> None:
    words = ["--logprobs", "--top-logprobs", "2", "--prompt-logprobs", "1", "--json"]
    result = invoke("run", engine_dir, "--prompt", "def f", *words, "--max-new-tokens", "8", "--ignore-eos")
    (row,) = json.loads(result.stdout)["outputs"]
    assert len(row["top_logprobs"]) == len(row["token_ids"]) == 8
    for token_id, logprob, entries in zip(row["token_ids"], row["logprobs"], row["top_logprobs"], strict=True):
        assert entries[0] == {"token_id": token_id, "logprob": logprob}  # greedy
        assert entries[0]["logprob"] >= entries[1]["logprob"]
    first, *others = row["prompt_logprobs"]
    assert first is None and len(others) == row["num_prompt_tokens"] - 1
    assert all(entry["logprob"] <= entry["top_logprobs"][0]["logprob"] for entry in others)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--top-logprobs", "2", "--json"], "top_logprobs: expected 0 without logprobs"),
        (["--prompt-logprobs", "2"], "--prompt-logprobs needs --json"),
        (["--n", "2", "--stream"], "--stream needs one sample (got --n 2)"),
        (["--n", "0"], "from 1 to 128"),
    ],
)
def test_what_cannot_be_is_refused(engine_dir, invoke, words, said) -> None:
    result = invoke("run", engine_dir, "--prompt", "x", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_every_sample_that_failed_is_named() -> None:
    job = Job(row_id="a", prompt="x", sampling=SamplingParams(n=2))
    first, second = (output_without_tokens(str(i), "error", text="", error=f"gone {i}") for i in range(2))
    assert list(_failure(job, replace(first, other_samples=(second,)))) == ["a: gone 0", "a: gone 1"]
