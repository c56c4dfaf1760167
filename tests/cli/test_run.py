import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.open_engine import open_engine
from dflash_trt.cli.prompts import Job
from dflash_trt.cli.result_files import output_rows, trace_lines
from dflash_trt.core.request import GenerationOutput, SamplingParams, TokenEvent
from dflash_trt.serving.llm import LLM
from tests.factories import END_OF_TEXT_ID, make_target

GREEDY = ["--max-new-tokens", "12", "--ignore-eos"]


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_prompt_prints_its_text_and_a_summary_on_stderr(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "def f", *GREEDY)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("\n")
    assert "1 request: 5 prompt and 12 output tokens" in result.stderr
    assert "time to first token" in result.stderr
    assert "bonus included" in result.stderr
    assert "accepted by draft position: 1: " in result.stderr


def test_rows_bring_penalties_and_bans_of_their_own(engine_dir, invoke, tmp_path) -> None:
    rules: list[dict[str, Any]] = [{}, {"repetition_penalty": 5.0}, {"logit_bias": {"65": 100}}]
    rows = _write_rows(tmp_path / "rows.jsonl", *({"prompt": "def f", **each} for each in rules))
    result = invoke("run", engine_dir, "--input-file", rows, "--max-new-tokens", "12", "--ignore-eos")
    assert result.exit_code == 0, result.stderr
    plain, penalized, biased = (row["token_ids"] for row in _rows(result.stdout))
    assert penalized != plain and biased == [65] * 12
    alone = invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--repetition-penalty", "5", "--json")
    assert json.loads(alone.stdout)["outputs"][0]["token_ids"] == penalized
    word = next(character for character in _rows(result.stdout)[0]["text"] if character.isascii())
    banned = invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--bad-word", word)
    assert (banned.exit_code, word in banned.stdout) == (0, False)


def test_several_prompts_are_labelled(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "a", "--prompt", "b", *GREEDY)
    assert result.exit_code == 0
    assert result.stdout.startswith("[1] ")
    assert "\n[2] " in result.stdout


def test_a_prompt_may_be_piped_in(engine_dir, invoke) -> None:
    piped = invoke("run", engine_dir, *GREEDY, stdin="def f\n")
    assert piped.exit_code == 0
    assert piped.stdout == invoke("run", engine_dir, "--prompt", "def f", *GREEDY).stdout


def test_streaming_prints_the_same_text_and_leaves_the_same_trace(engine_dir, tmp_path, invoke) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY, "--draft-length", 3]
    streamed = invoke(*words, "--stream", "--trace-file", tmp_path / "streamed")
    assert streamed.exit_code == 0
    assert streamed.stdout == invoke(*words, "--trace-file", tmp_path / "plain").stdout
    assert (tmp_path / "streamed").read_text() == (tmp_path / "plain").read_text() != ""
    assert "12 output tokens" in streamed.stderr


@pytest.mark.parametrize("flags", [["--no-drafter"], ["--draft-length", "0"], ["--draft-length", "1"]])
def test_greedy_text_does_not_depend_on_the_drafter(engine_dir, invoke, flags) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY]
    assert invoke(*words, *flags).stdout == invoke(*words).stdout


def test_a_run_without_the_drafter_verifies_nothing(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--no-drafter", "--json")
    document = json.loads(result.stdout)
    assert document["summary"]["uses_drafter"] is False
    assert document["summary"]["num_verify_steps"] == 0
    assert document["outputs"][0]["acceptance_length"] is None


def test_json_is_one_object_with_summary_and_outputs_and_nothing_on_stderr(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--json", "--logprobs")
    assert result.stderr == ""
    document = json.loads(result.stdout)
    summary, (row,) = document["summary"], document["outputs"]
    assert (
        summary["num_output_tokens"] == row["num_output_tokens"] == len(row["token_ids"]) == len(row["logprobs"]) == 12
    )
    assert summary["acceptance_length"] == row["acceptance_length"]
    assert summary["acceptance_length_includes_bonus"] is True
    assert len(summary["accepted_fraction_by_position"]) == summary["max_draft_tokens"] == 3
    assert row["finish_reason"] == "length"
    assert row["num_prompt_tokens"] == 5
    assert max(row["logprobs"]) <= 0


def test_a_file_of_rows_gives_a_file_of_results_in_its_order(engine_dir, tmp_path, invoke) -> None:
    source = _write_rows(
        tmp_path / "in.jsonl",
        {"prompt": "def f", "max_new_tokens": 30, "id": "long"},
        {"prompt": "def f", "max_new_tokens": 2, "id": "short", "category": "code"},
        {"prompt_token_ids": [9, 8, 7]},
        {"prompt": "def f", "temperature": 1.0, "seed": 5},
    )
    output = tmp_path / "out.jsonl"
    words = ["run", engine_dir, "--input-file", source, "--output-file", output, *GREEDY]
    result = invoke(*words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    rows = _rows(output.read_text())
    assert [(row["id"], row["num_output_tokens"]) for row in rows] == [("long", 30), ("short", 2), (3, 12), (4, 12)]
    assert [row.get("category") for row in rows] == [None, "code", None, None]
    assert rows[0]["token_ids"][:2] == rows[1]["token_ids"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    # Without an output file the same rows stand on stdout; with --json beside one, only the summary does.
    printed = _rows(invoke("run", engine_dir, "--input-file", source, *GREEDY).stdout)
    assert [row["token_ids"] for row in printed] == [row["token_ids"] for row in rows]
    summary = json.loads(invoke(*words, "--json", "--overwrite").stdout)
    assert summary.keys() == {"summary", "settings", "kv_pages", "chat_template_options"}


def test_a_text_that_the_engine_ends_is_counted_by_the_length_that_its_row_asked_for(
    engine_dir, tmp_path, invoke
) -> None:
    rows = [{"prompt": "def f", "max_new_tokens": length, "n": n} for length, n in ((2, 1), (300, 1), (200, 2))]
    words = ["--input-file", _write_rows(tmp_path / "in.jsonl", *rows), *GREEDY, "--temperature", "1"]
    assert "3 texts ended at the engine's max_seq_len" in invoke("run", engine_dir, *words).stderr


def test_a_number_of_a_row_is_that_of_the_output_by_its_name() -> None:
    fields = {name: 101 + i for i, name in enumerate(GenerationOutput.__dataclass_fields__) if name.startswith("num_")}
    output = GenerationOutput(
        request_id="r",
        text="x",
        token_ids=(1, 2, 3),
        logprobs=(),
        finish_reason="stop",
        time_to_first_token_s=0.25,
        total_s=1.5,
        **fields,
    )
    [row] = output_rows(Job(row_id=7, prompt="x", sampling=SamplingParams()), output)
    own = {"id": 7, "token_ids": [1, 2, 3], "num_output_tokens": 3}
    assert row == {name: getattr(output, name) for name in row.keys() - own.keys()} | own


def test_loading_is_no_part_of_the_time_of_a_run(engine_dir, invoke, monkeypatch) -> None:
    opened = open_engine

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return opened(*arguments, **options)

    monkeypatch.setattr("dflash_trt.cli.run.open_engine", slow)
    started = time.monotonic()
    summary = json.loads(invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--json").stdout)["summary"]
    assert summary["load_time_s"] >= 1.0
    assert summary["load_time_s"] + summary["wall_time_s"] <= time.monotonic() - started


def test_rows_may_come_from_stdin(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--input-file", "-", *GREEDY, stdin='{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row["id"] for row in _rows(result.stdout)] == [1, 2]


def test_the_trace_has_a_line_for_each_step_and_the_steps_add_up(engine_dir, tmp_path, invoke) -> None:
    source = _write_rows(tmp_path / "in.jsonl", {"prompt": "def f", "id": "a"}, {"prompt": "import", "id": "b"})
    trace = tmp_path / "trace.jsonl"
    result = invoke("run", engine_dir, "--input-file", source, "--trace-file", trace, *GREEDY, "--draft-length", 3)
    assert result.exit_code == 0, result.stderr
    lines = _rows(trace.read_text())
    for row in _rows(result.stdout):
        all_steps = [line for line in lines if line["id"] == row["id"]]
        assert [token for step in all_steps for token in step["token_ids"]] == row["token_ids"]
        steps = [step for step in all_steps if step["num_candidates"]]
        assert len(steps) == row["num_verify_steps"]
        assert sum(step["num_accepted"] for step in steps) == row["num_accepted_tokens"]
        assert sum(step["num_candidates"] for step in steps) == row["num_draft_tokens"]
        for step in steps:
            count = step["num_accepted"]
            drafts, emitted = step["draft_token_ids"], step["token_ids"]
            assert len(drafts) == step["num_candidates"] and drafts[:count] == emitted[:count]
            assert drafts[count : count + 1] != emitted[count : count + 1] or not emitted[count:]
        for before, after in pairwise(steps):
            assert after["context_len"] == before["context_len"] + before["num_accepted"] + 1
        assert steps[0]["context_len"] == row["num_prompt_tokens"]


def test_steps_of_the_trace_are_numbered_as_the_request_made_them(engine_dir, tmp_path, invoke) -> None:
    """Step 0 is the prefill, which verifies nothing: compared with what the Python API returns."""
    trace = tmp_path / "trace.jsonl"
    words = ["--prompt", "def f", "--trace-file", trace, "--draft-length", 3]
    assert invoke("run", engine_dir, *words, *GREEDY).exit_code == 0
    with LLM(engine_dir, draft_length=3) as llm:
        (output,) = llm.generate(["def f"], SamplingParams(max_new_tokens=12, ignore_eos=True))
    expected = [(step, event.num_candidates, event.token_ids) for step, event in enumerate(output.steps)]
    lines = _rows(trace.read_text())
    assert [(line["step"], line["num_candidates"], tuple(line["token_ids"])) for line in lines] == expected
    assert expected[0][:2] == (0, 0)


def test_the_trace_has_the_accepted_drafts_of_a_step_whose_tokens_a_stop_cut() -> None:
    steps = (TokenEvent(request_id="r", token_ids=(5,), num_candidates=3, num_accepted=2, context_len=7),)
    output = GenerationOutput(
        request_id="r",
        text=None,
        token_ids=(5,),
        logprobs=(),
        finish_reason="stop",
        num_prompt_tokens=1,
        num_verify_steps=1,
        num_draft_tokens=3,
        num_accepted_tokens=2,
        num_emitted_by_verify=3,
        time_to_first_token_s=0.0,
        total_s=0.0,
        steps=steps,
    )
    counts = {"context_len": 7, "num_candidates": 3, "num_accepted": 2}
    assert list(trace_lines("a", output)) == [{"id": "a", "step": 0, "token_ids": [5]} | counts]


@pytest.mark.parametrize(("flags", "most"), [([], 3), (["--draft-length", "2"], 2), (["--adaptive"], 3)])
def test_the_summary_names_the_k_of_the_run(engine_dir, invoke, flags, most) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY, *flags]
    assert json.loads(invoke(*words, "--json").stdout)["summary"]["max_draft_tokens"] == most
    assert f"K = {most} at most" in invoke(*words).stderr


def test_stop_strings_stop_tokens_and_the_end_token_stop(engine_dir, invoke) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY, "--json"]
    tokens = json.loads(invoke(*words).stdout)["outputs"][0]["token_ids"]
    stopped = json.loads(invoke(*words, "--stop-token-id", tokens[4]).stdout)["outputs"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"] == tokens[: tokens.index(tokens[4]) + 1]


def test_sampling_options_reach_the_engine(engine_dir, invoke) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY, "--json", "--temperature", "1.5"]
    texts = [
        tuple(json.loads(invoke(*words, *more).stdout)["outputs"][0]["token_ids"])
        for more in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--seed", "2", "--top-k", "1"])
    ]
    assert texts[0] == texts[1] != texts[2]
    greedy = json.loads(invoke("run", engine_dir, "--prompt", "def f", *GREEDY, "--json").stdout)
    assert list(texts[3]) == greedy["outputs"][0]["token_ids"]


def test_an_engine_without_a_tokenizer_serves_token_ids(tmp_path, invoke) -> None:
    make_target(tmp_path / "target", tokenizer=False)
    assert invoke("build", "--target", tmp_path / "target", "-o", tmp_path / "engine").exit_code == 0
    source = _write_rows(tmp_path / "in.jsonl", {"prompt_token_ids": [5, 6, 7]}, {"prompt": "text"})
    result = invoke("run", tmp_path / "engine", "--input-file", source, *GREEDY)
    assert result.exit_code == 3
    served, refused = _rows(result.stdout)
    assert served["text"] is None
    assert served["num_output_tokens"] == 12
    assert "no tokenizer" in refused["error"]


def test_chat_without_a_template_is_an_error_of_the_request(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, "--prompt", "hi", "--chat", *GREEDY)
    assert result.exit_code == 3
    assert "chat template" in result.stderr


def test_the_end_token_is_a_stop_unless_ignored(tmp_path, invoke) -> None:
    """A target whose every token is an end token."""
    make_target(tmp_path / "target", eos_token_id=list(range(END_OF_TEXT_ID, 272)))
    assert invoke("build", "--target", tmp_path / "target", "-o", tmp_path / "engine").exit_code == 0
    words = ["run", tmp_path / "engine", "--prompt", "def f", "--max-new-tokens", "5", "--json"]
    ended, ignored = (json.loads(invoke(*words, *more).stdout)["outputs"][0] for more in ([], ["--ignore-eos"]))
    assert (ended["finish_reason"], ended["num_output_tokens"]) == ("stop", 1)
    assert (ignored["finish_reason"], ignored["num_output_tokens"]) == ("length", 5)


def test_drafts_are_shown_with_marks(engine_dir, invoke) -> None:
    words = ["run", engine_dir, "--prompt", "def f", *GREEDY, "--draft-length", 3]
    text, marked = invoke(*words).stdout, invoke(*words, "--show-drafts").stdout
    assert "[-" in marked
    assert invoke(*words, "--show-drafts", "--stream").stdout == marked
    assert re.sub(r"\{\+(.*?)\+\}", r"\1", re.sub(r"\[-.*?-\]", "", marked), flags=re.DOTALL) == text
    several = invoke(*words, "--prompt", "x", "--show-drafts").stdout
    assert several.startswith(f"[1] {marked}[2] ")
    for option in (["--json"], ["--input-file", "x"], ["--output-file", "x"], ["--no-drafter"]):
        refused = invoke(*words[:-2], "--show-drafts", *option)
        assert (refused.exit_code, "--show-drafts" in refused.stderr) == (2, True)
