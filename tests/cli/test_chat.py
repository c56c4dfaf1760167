"""`dflash-trt run` with conversations, over an engine that has a chat template."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.cli import conversation
from dflash_trt.cli.conversation import _Conversation, converse
from dflash_trt.core.errors import RequestError
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.request import GenerationOutput, RequestStatistics, SamplingParams
from dflash_trt.serving.generation_batch import output_without_tokens
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.text import TextCodec
from tests.factories import edit_json, make_target
from tests.serving.tokenizers import CHAT_TEMPLATE

SHORT = ["--max-new-tokens", "2", "--ignore-eos"]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chat_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from click.testing import CliRunner

    from dflash_trt.cli.main import cli

    path = tmp_path_factory.mktemp("chat")
    target = make_target(path / "target")
    edit_json(target / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    words = ["build", "--target", str(target), "-o", str(path / "engine"), "--dtype", "float32", "--max-seq-len", "96"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return path / "engine"


def num_prompt_tokens(engine: Path, options: dict[str, Any]) -> int:
    return len(TextCodec.open(engine / "tokenizer").encode_chat(HI, options))


def test_template_options_reach_the_template_from_the_command_line(chat_engine, invoke) -> None:
    words = ["run", chat_engine, "--prompt", "hi", "--chat", "--json", *SHORT]
    plain = json.loads(invoke(*words).stdout)
    shouted = json.loads(invoke(*words, "--chat-template-option", "shout=true").stdout)
    assert plain["summary"]["num_prompt_tokens"] == num_prompt_tokens(chat_engine, {})
    assert shouted["summary"]["num_prompt_tokens"] == num_prompt_tokens(chat_engine, {"shout": True})
    assert num_prompt_tokens(chat_engine, {"shout": True}) > num_prompt_tokens(chat_engine, {})


def test_template_options_reach_the_template_from_rows(chat_engine, invoke, tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"messages": HI}, {"messages": HI, "chat_template_kwargs": {"shout": True}}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke("run", chat_engine, "--input-file", source, *SHORT)
    assert result.exit_code == 0, result.stderr
    numbers = [json.loads(line)["num_prompt_tokens"] for line in result.stdout.splitlines()]
    assert numbers == [num_prompt_tokens(chat_engine, {}), num_prompt_tokens(chat_engine, {"shout": True})]


def test_rows_that_no_engine_could_hold_fail_alone_and_at_once(chat_engine, invoke, tmp_path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    spaces = " " * 12_000_000
    rows = [{"prompt": "a"}, {"prompt": spaces}, {"messages": [{"role": "user", "content": spaces}]}, {"prompt": "b"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke("run", chat_engine, "--input-file", source, "--output-file", output, *SHORT)
    assert result.exit_code == 3
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["finish_reason"] for row in written] == ["length", "error", "error", "length"]
    assert "bytes, as more text does not fit into max_seq_len tokens, found 12000000" in written[1]["error"]
    assert "bytes of messages as JSON, found 12000" in written[2]["error"]


class Scripted:
    """Answers messages in turn: with a text, or with an error. `asked` are the prompts."""

    def __init__(self, *answers: GenerationOutput) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = iter(answers)

    def submit(self, prompt: dict[str, Any], sampling: SamplingParams, *, reports_drafts: bool) -> Any:
        self.asked.append(prompt)
        answer = next(self._answers)
        return nullcontext(ScriptedStream(answer))


class ScriptedStream:
    def __init__(self, answer: GenerationOutput) -> None:
        self.result = lambda: answer

    def __iter__(self) -> Iterator[StreamChunk]:
        yield StreamChunk(text=self.result().text, token_ids=())


def _answer(text: str, *, seconds: float = 1.0, error: str | None = None) -> GenerationOutput:
    output = output_without_tokens("r", "stop" if error is None else "error", text=text, error=error)
    cached = RequestStatistics(num_prefix_hit_tokens=int(2 * seconds))
    return replace(output, total_s=seconds, token_ids=(1, 2), num_prompt_tokens=10, statistics=cached)


def test_what_is_refused_or_interrupted_before_its_answer_is_no_part_of_a_conversation(capsys) -> None:
    options: Any = SimpleNamespace(sampling=SamplingParams(), template_kwargs={}, show_drafts=False, system=None)
    said_so_far, failures = _Conversation(options), [KeyboardInterrupt(), RequestError("too long.")]
    llm: Any = Scripted(*[_answer("A")] * 4)

    class Refusing:
        def submit(self, *_: Any, **options: Any) -> Any:
            raise failures.pop(0)

    refusing: Any = Refusing()
    said_so_far.answer(llm, "a")
    for _ in range(2):
        said_so_far.answer(refusing, "lost")
    said_so_far.answer(llm, "b")
    assert [message["content"] for message in llm.asked[-1]["messages"]] == ["a", "A", "b"]
    assert "error: too long. Or type /reset." in capsys.readouterr().err
    said_so_far.print_summary(load_time_s=0.5, max_draft_tokens=0)
    assert "2 requests: " in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_a_conversation_ends_with_the_user_or_with_its_engine(monkeypatch, capsys, fails: bool) -> None:
    llm = SimpleNamespace(failure=None, config=SimpleNamespace(max_draft_tokens=0))
    typed = iter(["", ""])

    def type_line() -> str | None:
        llm.failure = RuntimeError("the device is gone") if fails else None
        return next(typed, None)

    monkeypatch.setattr(conversation, "open_engine", lambda *_, **__: nullcontext(llm))
    monkeypatch.setattr(conversation, "_typed", type_line)
    options: Any = SimpleNamespace(sampling=SamplingParams(), template_kwargs={}, show_drafts=False, system=None)
    assert converse(options) == (ExitCode.FAILED if fails else ExitCode.DONE)
    assert len(list(typed)) == (1 if fails else 0)
    assert "request" not in capsys.readouterr().err, "no summary of nothing"


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation_sends_its_system_message_then_all_turns_and_then_the_new_one(system, capsys) -> None:
    options: Any = SimpleNamespace(
        sampling=SamplingParams(), template_kwargs={"shout": True}, show_drafts=False, system=system
    )
    said_so_far = _Conversation(options)
    llm: Any = Scripted(
        _answer("A"), _answer("lost", error="too long"), _answer("B", seconds=2.5), _answer("C", seconds=4.0)
    )
    for text in ("a", "fails", "b"):
        said_so_far.answer(llm, text)
    said_so_far.reset()
    said_so_far.answer(llm, "c")
    first = [] if system is None else [("system", system)]
    turns = [("user", "a"), ("assistant", "A")]
    assert [[(each["role"], each["content"]) for each in prompt["messages"]] for prompt in llm.asked] == [
        [*first, ("user", "a")],
        [*first, *turns, ("user", "fails")],
        [*first, *turns, ("user", "b")],
        [*first, ("user", "c")],
    ]
    assert all(prompt["chat_template_kwargs"] == {"shout": True} for prompt in llm.asked)
    capsys.readouterr()
    said_so_far.print_summary(load_time_s=0.5, max_draft_tokens=0)
    said = capsys.readouterr().err
    assert "4 requests (1 failed)" in said and "8 output tokens in 8.50 s" in said and "loaded in 0.50 s" in said
    assert "prompt tokens from the prefix cache: 17 of 40" in said, "of all turns"
