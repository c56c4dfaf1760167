import json
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = {"prompt": "def f", "id": "good"}
DFLASH_TRT = [sys.executable, "-m", "dflash_trt.cli.main"]
GREEDY = ["--max-new-tokens", "6", "--ignore-eos"]

BAD_LINES = {
    b'{"prompt": ""}': "at least 1 token",
    b'{"prompt_token_ids": []}': "at least 1 token",
    b'{"prompt_token_ids": [1, 9999]}': "an integer from 0 to",
    b'{"prompt_token_ids": "abc"}': "expected a list",
    b'{"prompt": 5}': "expected a string",
    b'{"messages": []}': "messages",
    b'{"prompt": "%s"}' % (b"x" * 200): "max_seq_len",
    b'{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens",
    b'{"prompt": "\xc3("}': "UTF-8",
    b'{"prompt": ': "a JSON object",
    b'{"prompt": "a", "top_q": 1}': "top_p",
}


def test_bad_rows_fail_alone_and_the_exit_code_says_so(engine_dir, tmp_path, invoke) -> None:
    """Every bad line between two good ones: the good ones come out as if the bad ones were not there."""
    good = json.dumps(GOOD).encode()
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([good, *(line + b"\n" + good for line in BAD_LINES)]))
    result = invoke("run", engine_dir, "--input-file", source, "--output-file", output, *GREEDY)
    assert result.exit_code == 3
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 1 + 2 * len(BAD_LINES)
    served, refused = rows[::2], rows[1::2]
    assert {row["id"] for row in served} == {"good"}
    assert len({tuple(row["token_ids"]) for row in served}) == 1
    for line_number, row, said in zip(range(2, 99, 2), refused, BAD_LINES.values(), strict=False):
        assert row["id"] == line_number
        assert row["finish_reason"] == "error"
        assert row["token_ids"] == []
        assert said in row["error"]
    assert f"error: {len(BAD_LINES)} of {len(rows)} requests failed" in result.stderr
    assert "... and 1 more" in result.stderr
    for line_number, said in list(zip(range(2, 99, 2), BAD_LINES.values(), strict=False))[:10]:  # each its own reason
        (line,) = [line for line in result.stderr.splitlines() if line.startswith(f"  - {line_number}: ")]
        assert said in line
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "at least 1 token"), ("x" * 200, "max_seq_len"), ("\udcff", "valid Unicode text")]
)
@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_bad_prompt_on_the_command_line_is_one_error(engine_dir, invoke, prompt, said, flags) -> None:
    result = invoke("run", engine_dir, "--prompt", prompt, *GREEDY, *flags)
    assert result.exit_code == 3
    assert result.stdout.strip() == ""
    assert result.stderr.count("error: ") == 1
    assert said in result.stderr


def test_piped_text_that_is_no_utf8_is_one_error(engine_dir, invoke) -> None:
    result = invoke("run", engine_dir, *GREEDY, stdin=b"abc\xff")
    assert result.exit_code == 3
    assert "valid Unicode text" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens: expected an integer of 1 or more, found 0"),
        (["--prompt", "a", "--temperature", "-1", "--top-p", "2"], "2 problems"),
        (["--prompt", "a", "--temperature", "hot"], "--temperature"),
        (["--prompt", "a", "--draft-length", "9"], "error: --draft-length: expected 0 to 3"),
        (
            ["--prompt", "a", "--draft-length", "-1"],
            "--draft-length: expected K of 0 to 2147483647, or pairs REQUESTS:K such as 1:7,16:5, found '-1'",
        ),
        (
            ["--prompt", "a", "--draft-length", "1", "--no-drafter"],
            "--no-drafter and --draft-length are mutually exclusive",
        ),
        (["--prompt", "a", "--kv-cache-bytes", "0"], "--kv-cache-bytes: expected an integer of 1 or more, found 0"),
        (["--prompt", "a", "--kv-cache-free-memory-fraction", "0"], "0.0 is not in the range 0<x<=1"),
        (["--prompt", "a", "--input-file", "x"], "--prompt and --input-file are mutually exclusive"),
        (["--prompt", "a", "--prompt", "b", "--stream"], "--stream needs one --prompt (got 2)"),
        (["--prompt", "a", "--stream", "--json"], "--stream and --json are mutually exclusive"),
        (["--prompt", "a", "--stream", "--output-file", "x"], "--stream and --output-file are mutually exclusive"),
        (["--input-file", "x", "--stream"], "--stream and --input-file are mutually exclusive"),
        (["--prompt", "a", "--show-drafts", "--no-drafter"], "--show-drafts and --no-drafter are mutually exclusive"),
        (["--prompt", "a", "--stream", "--n", "2"], "--stream needs one sample (got --n 2)"),
        (["--prompt", "a", "--show-drafts", "--json"], "--show-drafts needs texts on stdout"),
        (["--prompt", "a", "--show-drafts", "--output-file", "x"], "--show-drafts needs texts on stdout"),
        (["--input-file", "x", "--show-drafts"], "--show-drafts needs texts on stdout"),
        (["--prompt", "a", "--prompt-logprobs", "1"], "--prompt-logprobs needs --json"),
        (["--prompt", "a", "--column", "prompt=b"], "--column needs --input-file"),
        (["--prompt", "a", "--split", "b"], "--split needs --input-file"),
        (["--prompt", "a", "--category", "b"], "--category needs --input-file"),
        (["--prompt", "a", "--num-prompts", "1"], "--num-prompts needs --input-file"),
        (["--prompt", "a", "--system", "s"], "--system needs --chat"),
        (["--prompt", "a", "--chat-template-option", "b=1"], "--chat-template-option needs --chat"),
        (["--prompt", "a", "--chat", "--chat-template-option", "b"], "--chat-template-option: expected NAME=VALUE"),
        (["--prompt", "a", "--chat", "--chat-template-option", "b=False"], "VALUE is JSON or text, found 'b=False'"),
        (["--prompt", "a", "--chat", "--chat-template-option", "padding=1"], "found padding, decided by the"),
        (["--prompt", "a", "--logprobs"], "--logprobs needs --json"),
        (["--input-file", "/nowhere/in.jsonl"], "/nowhere/in.jsonl: expected a JSONL file"),
        (["--prompt", "a", "--output-file", "/nowhere/out.jsonl"], "/nowhere/out.jsonl: expected a file to write"),
        (["--prompt", "a", "--trace-file", "/nowhere/out.jsonl"], "/nowhere/out.jsonl: expected a file to write"),
        (["--input-file", "/dev/null"], "expected at least one prompt"),
        (["--prompt", "a", "--resume"], "--resume needs --output-file"),
        (["--prompt", "a", "--resume", "--output-file", "/dev/null"], "--output-file with a regular file"),
    ],
)
def test_wrong_options_are_usage_errors(engine_dir, invoke, words, said) -> None:
    result = invoke("run", engine_dir, *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in result.stderr


def test_all_wrong_options_come_in_one_error(engine_dir, invoke) -> None:
    words = ["--prompt", "a", "--top-p", "7", "--no-drafter", "--adaptive", "--stream", "--json"]
    result = invoke("run", engine_dir, *words)
    assert result.exit_code == 2
    for said in ("top_p: expected", "--no-drafter and --adaptive are mutually", "--stream and --json are mutually"):
        assert said in result.stderr


def test_a_missing_engine_is_one_error_and_no_output_file(tmp_path, invoke) -> None:
    result = invoke("run", tmp_path / "none", "--prompt", "a", "--output-file", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "expected an engine directory, found nothing at that path" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_results_may_go_to_what_is_no_regular_file(engine_dir, invoke) -> None:
    assert invoke("run", engine_dir, "--prompt", "a", *GREEDY, "--output-file", "/dev/null").exit_code == 0
    assert Path("/dev/null").is_char_device()


def test_a_reader_that_goes_away_ends_the_run_quietly(engine_dir) -> None:
    command = [*DFLASH_TRT, "run", str(engine_dir), "--input-file", "-", "--max-new-tokens", "40"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b'{"prompt": "def f"}\n' * 500)
        process.stdin.close()
        assert process.stdout.readline().startswith(b'{"id": 1')
        process.stdout.close()
        stderr = process.stderr.read()
    assert process.returncode == 1
    settings, pages = stderr.splitlines()  # what every run says at its start
    assert settings.startswith(b"settings: ") and pages.startswith(b"K/V: ")
