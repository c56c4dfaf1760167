"""`dflash-trt show-drafts`: texts of an earlier run with their drafts, from its trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.draft_marks import marked
from dflash_trt.cli.help_text import PATH, examples
from dflash_trt.core.errors import ConfigError

if TYPE_CHECKING:
    from dflash_trt.serving.marked_texts import MarkedText
    from dflash_trt.serving.text import TextCodec

Line = dict[str, Any]


@click.command(
    short_help="Show the drafts of an earlier run, from its trace.",
    epilog=examples("dflash-trt show-drafts engine trace.jsonl"),
)
@click.argument("engine_dir", metavar="ENGINE_DIR", type=PATH)
@click.argument("trace_file", metavar="TRACE_FILE", type=PATH)
def show_drafts(engine_dir: Path, trace_file: Path) -> None:
    """Print the texts of TRACE_FILE, which `run --trace-file` wrote, with their drafts.

    Accepted drafts are green and rejected ones red on a terminal, else {+accepted+} and [-rejected-]; the rest is the
    target's own. Of the engine only the tokenizer is read.
    """
    from dflash_trt.engine_dir import EngineDir
    from dflash_trt.serving.llm import open_codec

    texts = _read_trace(trace_file)
    codec = open_codec(EngineDir.open(engine_dir))
    if codec is None:
        hint = "Name the engine that made the trace, or one with the same tokenizer."
        raise ConfigError.about(str(engine_dir), expected="an engine with a tokenizer", found="one without", hint=hint)
    for (row_id, sample_index), lines in texts.items():
        names = [str(row_id)] + ([] if sample_index is None else [f"sample {sample_index}"])
        prefix = f"[{', '.join(names)}] " if len(texts) > 1 else ""
        click.echo(prefix + marked(_marked_lines(lines, codec)))


def _marked_lines(lines: list[Line], codec: "TextCodec") -> "Iterator[MarkedText]":
    from dflash_trt.serving.marked_texts import DraftMarker

    marker = DraftMarker(codec)
    for line in lines:
        yield from marker.mark(line["token_ids"], line["draft_token_ids"], line["num_accepted"])
    yield from marker.flush()


def _read_trace(path: Path) -> dict[tuple[str | int, int | None], list[Line]]:
    """The steps of each text, by its row's id and its sample index.

    Raises:
        ConfigError: `path` cannot be read, or is no trace with drafts.
    """
    texts: dict[tuple[str | int, int | None], list[Line]] = {}
    try:
        for number, content in enumerate(path.read_bytes().splitlines(), start=1):
            line = _checked(content, f"{path}, line {number}")
            texts.setdefault((line["id"], line.get("sample_index")), []).append(line)
    except OSError as error:
        found, hint = str(error.strerror), "Check the path."
        raise ConfigError.about(str(path), expected="a trace of `run`", found=found, hint=hint) from error
    return texts


def _checked(content: bytes, place: str) -> Line:
    try:
        line = json.loads(content)
    except ValueError:
        line = None
    hint = "Run the prompts again with `run --trace-file`."
    if not (isinstance(line, dict) and isinstance(line.get("id"), str | int) and _is_count(line.get("num_accepted"))):
        raise ConfigError.about(place, expected="a step of a trace", found=f"{content[:40]!r}", hint=hint)
    for name in ("token_ids", "draft_token_ids"):
        if not (isinstance(line.get(name), list) and all(map(_is_count, line[name]))):
            raise ConfigError.about(place, expected=f"{name}, a list of token ids", found="none", hint=hint)
    return line


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
