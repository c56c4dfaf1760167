"""What `run` prints as it comes."""

import sys
from contextlib import redirect_stderr
from dataclasses import fields, replace
from io import BytesIO, StringIO, TextIOWrapper
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import RuntimeConfig, SamplingParams
from dflash_trt.cli.open_engine import listed_failures
from dflash_trt.cli.prompts import Job
from dflash_trt.cli.run import _progress
from dflash_trt.cli.run_options import RunOptions
from dflash_trt.core.errors import ConfigError
from dflash_trt.serving.generation_batch import joined_output, output_without_tokens
from tests.cli.test_options_arrive import RUNTIME
from tests.cli.test_status_line import Terminal

OPTIONS = RunOptions(
    engine_dir=Path("engine"),
    prompts=("a",),
    input_file=None,
    columns=(),
    split=None,
    categories=(),
    num_prompts=None,
    output_file=None,
    resume=False,
    trace_file=None,
    overwrite=False,
    chat=False,
    system=None,
    chat_template_options=(),
    stream=None,
    show_drafts=False,
    as_json=False,
    sampling=SamplingParams(),
    runtime=RuntimeConfig(),
)
OF_TWO = SamplingParams(n=2, temperature=0.8)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_one_sample_of_one_prompt_streams_to_a_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert OPTIONS.streams(1) == is_terminal
    assert not OPTIONS.streams(2)
    assert not replace(OPTIONS, sampling=OF_TWO).streams(1)
    for other in ({"as_json": True}, {"output_file": Path("out")}, {"input_file": Path("in")}):
        assert not replace(OPTIONS, **other).streams(1)


@pytest.mark.parametrize("said", [True, False])
def test_what_is_said_holds_everywhere(monkeypatch: pytest.MonkeyPatch, said: bool) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: not said)
    assert replace(OPTIONS, stream=said, sampling=OF_TWO).streams(2) == said


def test_a_conversation_is_a_chat_at_a_terminal_without_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    has_terminal = {"stdin": True, "stdout": True}
    for name in has_terminal:
        monkeypatch.setattr(getattr(sys, name), "isatty", lambda name=name: has_terminal[name])
    chat = replace(OPTIONS, chat=True, prompts=())
    assert chat.is_conversation
    for other in ({"chat": False}, {"prompts": ("a",)}, {"input_file": Path("in")}):
        assert not replace(chat, **other).is_conversation
    for name in has_terminal:
        has_terminal[name] = False
        assert not chat.is_conversation
        has_terminal[name] = True


def test_a_file_has_one_part_in_a_run_by_whatever_path(tmp_path: Path) -> None:
    rows, link = tmp_path / "rows", tmp_path / "link"
    rows.touch()
    link.symlink_to(rows)
    (tmp_path / "directory").mkdir()
    files = ("input_file", "output_file", "trace_file")
    for other in (rows, link, tmp_path / "directory" / ".." / "rows"):
        for first, second in combinations(files, 2):
            named = replace(OPTIONS, prompts=(), overwrite=True, **{first: rows, second: other})
            words = " and ".join(f"--{name.replace('_', '-')}" for name in (first, second))
            with pytest.raises(ConfigError, match=f"{words} name the same file"):
                named.check()


@pytest.mark.parametrize("piped", ["a", "a\n", "a\n\n", " a ", "\n"])
def test_a_piped_prompt_loses_the_last_end_of_line_and_nothing_else(monkeypatch, piped: str) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(piped.encode())))
    (row,) = replace(OPTIONS, prompts=()).read_rows()
    assert isinstance(row, Job)
    assert row.prompt == {"prompt": piped[:-1] if piped.endswith("\n") else piped}


def test_a_run_goes_on_with_what_texts_do_not_depend_on() -> None:
    same = {"engine_dir": Path("e"), "prompts": (), "input_file": Path("i"), "output_file": Path("o"), "resume": True}
    same |= {"columns": ("prompt=p",), "split": "test", "categories": ("a",), "num_prompts": 2}
    same |= {"overwrite": True, "stream": False, "show_drafts": True, "as_json": True}
    other: dict[str, Any] = {"chat": True, "system": "s", "chat_template_options": ("a=1",), "trace_file": Path("t")}
    other["sampling"] = SamplingParams(temperature=0.5)
    assert {*same, *other, "runtime"} == {field.name for field in fields(OPTIONS)}
    for expected, changes in ((True, same), (False, other)):
        for name, value in changes.items():
            changed = replace(OPTIONS, **{name: value}).text_settings()
            assert (changed == OPTIONS.text_settings()) == expected, name
    memory = {"kv_cache_bytes", "kv_cache_free_memory_fraction", "max_queue_len", "seed"}
    memory |= {"host_cache_bytes", "disk_cache_dir", "disk_cache_bytes", "publish_prompts"}
    memory |= {"nnodes", "master_addr", "master_port"}
    for name, (_, value) in RUNTIME.items():
        changed = replace(OPTIONS, runtime=RuntimeConfig(**{name: value})).text_settings()
        assert (changed == OPTIONS.text_settings()) == (name in memory), name


@pytest.mark.parametrize(
    ("num_jobs", "output_file", "has_screen", "is_shown"),
    [(2, Path("o"), True, True), (1, Path("o"), True, False), (2, None, True, False), (2, None, False, True)],
)
def test_a_bar_counts_requests_where_no_text_is_printed(
    monkeypatch, num_jobs: int, output_file: Path | None, has_screen: bool, is_shown: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: has_screen)
    output = joined_output([output_without_tokens("r", "stop", text="")] * 2)
    with redirect_stderr(terminal), _progress(replace(OPTIONS, output_file=output_file), num_jobs) as advance:
        for _ in range(num_jobs):
            advance(output)
    assert ("2/2" in terminal.getvalue()) == is_shown
    assert bool(terminal.getvalue()) == is_shown
    pipe = StringIO()
    with redirect_stderr(pipe), _progress(replace(OPTIONS, output_file=Path("o")), 2) as advance:
        advance(output)
    assert not pipe.getvalue()


def test_the_bar_says_the_tokens_of_all_samples_a_second(monkeypatch) -> None:
    now_s, terminal = [5.0], Terminal()
    for module in ("run", "time_left", "status_line"):
        monkeypatch.setattr(f"dflash_trt.cli.{module}.time.monotonic", lambda: now_s[0])
    samples = [replace(output_without_tokens("r", "stop", text=""), token_ids=tuple(range(size))) for size in (3, 5)]
    with redirect_stderr(terminal), _progress(replace(OPTIONS, output_file=Path("o")), 2) as advance:
        now_s[0] = 7.0
        advance(joined_output(samples))
        assert terminal.getvalue() == "requests: 1/2, 4 tok/s, about 2 s left"


@pytest.mark.parametrize(("num_failures", "last"), [(1, "  - 0"), (10, "  - 9"), (11, "  - ... and 1 more")])
def test_failures_are_listed_up_to_ten(num_failures: int, last: str) -> None:
    heading, *lines = listed_failures([str(number) for number in range(num_failures)], 20).splitlines()
    assert heading == f"{num_failures} of 20 requests failed"
    assert (len(lines), lines[-1]) == (num_failures, last)
