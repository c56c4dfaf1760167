"""The rows of `run`, `eval` and every bench: one reader for all of them."""

import json
import re
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli.prompt_source import STDIN_NAME, PromptSource
from dflash_trt.cli.prompts import Defaults, Job, Refusal
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.sampling import SamplingParams
from tests.cli.calls import RecordedError

DEFAULTS = Defaults(sampling=SamplingParams())
ROWS: list[Any] = [{"prompt": f"{name}{index}", "category": name} for name in "ab" for index in range(2)]


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(rows: Any) -> list[str]:
    return [row.prompt["prompt"] for row in rows]


def test_rows_are_in_order_and_blank_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n \r\n{"prompt": "b\\u2028", "id": "mine"}\n{"prompt": "c"}')
    rows = PromptSource(path=path).rows(DEFAULTS)
    assert [row.row_id for row in rows] == [1, "mine", 4]


def test_a_measurement_alternates_categories_and_a_run_keeps_the_order(tmp_path: Path) -> None:
    source = PromptSource(path=written(tmp_path, *ROWS), num_prompts=3)
    assert texts(source.jobs()) == ["a0", "b0", "a1"]
    assert texts(replace(source, num_prompts=2).jobs()) == ["a0", "b0"], "of all rows, not of the first two"
    assert texts(source.rows(DEFAULTS)) == ["a0", "a1", "b0"]
    of_b = PromptSource(path=source.path, categories=("b",))
    assert texts(of_b.jobs()) == texts(of_b.rows(DEFAULTS)) == ["b0", "b1"]
    rows = [{"prompt": name, "category": name} for name in "hgfedba"]
    with pytest.raises(ConfigError, match=r"--category c: expected a category of .*found a, b, d, e, f, g, h\."):
        PromptSource(path=written(tmp_path, *rows, {"prompt": "of none"}), categories=("c",)).jobs()


def test_wrong_rows_stay_in_a_run_and_stop_a_measurement(tmp_path: Path) -> None:
    source = PromptSource(path=written(tmp_path, ROWS[0], {"promt": "x"}), categories=("a",))
    _, refused = source.rows(DEFAULTS)
    assert isinstance(refused, Refusal) and "Did you mean 'prompt'?" in refused.error
    with pytest.raises(ConfigError, match="2: input row"):
        source.jobs()
    assert texts(replace(source, num_prompts=1).jobs()) == ["a0"], "a wrong row that is not wanted does not matter"
    wrong = PromptSource(path=written(tmp_path, *[{"promt": "x"}] * 7))
    with pytest.raises(ConfigError) as error:
        wrong.jobs()
    assert re.findall(r"(\d): input row", str(error.value)) == list("12345"), "the first five"


def test_a_row_without_a_value_in_a_named_column_has_no_such_field(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b"}]
    path = written(tmp_path, {"question": "a", "talk": None}, {"talk": chat, "other": 1})
    source = PromptSource(path=path, columns={"prompt": "question", "messages": "talk"})
    assert [row.prompt for row in source.jobs()] == [{"prompt": "a"}, {"messages": chat}]


def test_only_what_sends_turn_by_turn_takes_several_turns(tmp_path: Path) -> None:
    source = PromptSource(path=written(tmp_path, {"turns": ["one", "two"]}, {"turns": ["one"]}))
    refused, single = source.rows(DEFAULTS)
    assert isinstance(refused, Refusal) and "turns: expected one turn, found 2" in refused.error
    assert isinstance(single, Job) and single.is_conversation
    assert [len(job.later_turns) for job in source.jobs(takes_turns=True)] == [1, 0]


def test_rows_come_from_stdin_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b'{"prompt": "a"}\n')))
    assert texts(PromptSource(path=STDIN_NAME).jobs()) == ["a"]


COMMANDS = {
    "run": (["run", "ENGINE"], "dflash_trt.cli.run._run"),
    "eval": (["eval", "ENGINE", "--against", "ENGINE"], "dflash_trt.cli.eval._measure"),
    "speedup": (["bench", "speedup", "ENGINE"], "dflash_trt.bench.speedup.compare"),
    "throughput": (["bench", "throughput", "ENGINE"], "dflash_trt.bench.throughput.compare_policies"),
    "serve": (["bench", "serve", "http://127.0.0.1:9"], "dflash_trt.bench.server_sweep.sweep_servers"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_same_rows(name: str, engine_dir: Path, tmp_path: Path, invoke, monkeypatch) -> None:
    if name == "serve":
        pytest.importorskip("aiohttp", reason="needs the extra 'serve'")
    words, target = COMMANDS[name]
    taken: list[str] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        taken.append(repr((args, kwargs)))
        raise RecordedError("recorded")

    monkeypatch.setattr(target, record)
    rows = written(tmp_path, *({"text": row["prompt"], "kind": row["category"], "more": 1} for row in ROWS))
    options = ["--input-file", rows, "--column", "prompt=text", "--column", "category=kind"]
    options += ["--category", "b", "--num-prompts", 1]
    words = [word.replace("ENGINE", str(engine_dir)) for word in words]
    ran = invoke(*words, *options)
    assert ran.stderr == "error: recorded\n"
    assert [name for name in ("a0", "a1", "b0", "b1") if f"'{name}'" in taken[0]] == ["b0"]
    assert "--split: expected a directory of a data set" in invoke(*words, "--input-file", rows, "--split", "s").stderr


def test_options_of_rows_need_a_file(invoke) -> None:
    words = ["--column", "prompt=text", "--split", "s", "--category", "b", "--num-prompts", "1"]
    ran = invoke("run", "dir", "--prompt", "x", *words)
    assert ran.exit_code == 2
    for option in ("--column", "--split", "--category", "--num-prompts"):
        assert f"{option} needs --input-file." in ran.stderr
