"""`dflash-trt run DIR --chat` on a terminal without a prompt: a conversation, until Ctrl-D or /exit.

Knows the terminal and the messages so far; everything about generation is LLM's.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.draft_marks import marked_chunks, refuse_drafts
from dflash_trt.cli.open_engine import open_engine
from dflash_trt.cli.report import summarize, summary_lines
from dflash_trt.cli.run_options import RunOptions
from dflash_trt.core.errors import RequestError
from dflash_trt.core.exit_codes import ExitCode
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.request import GenerationOutput

if TYPE_CHECKING:
    from dflash_trt.serving.llm import LLM
    from dflash_trt.serving.output_processor import StreamChunk
    from dflash_trt.serving.request_reader import RequestReader
    from dflash_trt.serving.stream import RequestStream

_COMMANDS = ("/reset", "/exit", "/help", "/quit")
_HINT = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def converse(options: RunOptions) -> ExitCode:
    """Answer what the user types, each message after those before it.

    Raises:
        RequestError: the engine has no chat template, or it does not take such messages; found before the load.
    """
    conversation = _Conversation(options)
    started = time.monotonic()

    def before_load(reader: "RequestReader") -> None:
        if options.show_drafts:
            refuse_drafts(options.engine_dir, reader)
        reader.read(conversation.prompt("Hello"), options.sampling)

    with open_engine(options, has_conversations=True, before_load=before_load) as llm:
        load_time_s = time.monotonic() - started
        click.echo(_HINT, err=True)
        while llm.failure is None and (text := _typed()) is not None:
            if text == "/reset":
                conversation.reset()
            elif text.startswith("/") and nearest_name(text, _COMMANDS) is not None:  # /help, or one that is misspelt
                click.echo(_HINT, err=True)
            elif text:
                conversation.answer(llm, text)
        conversation.print_summary(load_time_s=load_time_s, max_draft_tokens=llm.config.max_draft_tokens)
        return ExitCode.DONE if llm.failure is None else ExitCode.FAILED


class _Conversation:
    def __init__(self, options: RunOptions) -> None:
        self._sampling = options.sampling
        self._shows_drafts = options.show_drafts
        self._kwargs = options.template_kwargs
        self._system = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._messages: list[dict[str, str]] = []  # without the system's
        self._outputs: list[GenerationOutput] = []  # from all conversations

    def prompt(self, text: str) -> dict[str, Any]:
        messages = [*self._system, *self._messages, {"role": "user", "content": text}]
        return {"messages": messages} | ({"chat_template_kwargs": self._kwargs} if self._kwargs else {})

    def reset(self) -> None:
        self._messages = []

    def answer(self, llm: "LLM", text: str) -> None:
        """Print the answer as it comes. What was said before Ctrl-C counts; a message that fails is forgotten."""
        text_of = marked_chunks(llm.codec) if self._shows_drafts and llm.codec is not None else _text_of
        try:
            with llm.submit(self.prompt(text), self._sampling, reports_drafts=self._shows_drafts) as stream:
                output = _printed(stream, text_of)
        except RequestError as error:
            click.secho(f"error: {error} Or type /reset.", fg="red", err=True)
            return
        except KeyboardInterrupt:  # before the answer began
            click.echo()
            return
        self._outputs.append(output)
        if output.error is not None:
            click.secho(f"error: {output.error}", fg="red", err=True)
            return
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": output.text or ""}]

    def print_summary(self, *, load_time_s: float, max_draft_tokens: int) -> None:
        if not self._outputs:
            return
        summary = summarize(
            self._outputs,
            max_new_tokens=[self._sampling.max_new_tokens] * len(self._outputs),
            num_refused=0,
            load_time_s=load_time_s,
            wall_time_s=sum(output.total_s for output in self._outputs),
            max_draft_tokens=max_draft_tokens,
        )
        for line in summary_lines(summary):
            click.echo(line, err=True)
        num_cached = sum(output.statistics.num_prefix_hit_tokens for output in self._outputs)
        click.echo(f"prompt tokens from the prefix cache: {num_cached} of {summary.num_prompt_tokens}", err=True)


def _typed() -> str | None:
    """The next line; None when the user ends the conversation. Ctrl-C drops the line."""
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` edits lines, and recalls earlier ones, once it is loaded
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return None
        except UnicodeDecodeError as error:
            click.secho(f"error: expected UTF-8 text, found {error.reason}", fg="red", err=True)
        except KeyboardInterrupt:
            click.echo(f"\n{_HINT}", err=True)
        else:
            return None if text == "/exit" else text


def _text_of(chunk: "StreamChunk") -> str:
    return chunk.text or ""


def _printed(stream: "RequestStream", text_of: "Callable[[StreamChunk], str]") -> GenerationOutput:
    try:
        for chunk in stream:
            click.echo(text_of(chunk), nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
    click.echo()
    return stream.result()
