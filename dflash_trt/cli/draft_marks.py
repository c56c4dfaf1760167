"""A text with its drafts, as `--show-drafts` prints it."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dflash_trt.core.errors import ConfigError

if TYPE_CHECKING:
    from dflash_trt.serving.marked_texts import MarkedText
    from dflash_trt.serving.output_processor import StreamChunk
    from dflash_trt.serving.request_reader import RequestReader
    from dflash_trt.serving.text import TextCodec

# By the origin of a text.
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "target": {"bold": True},
    "accepted": {"fg": "green"},
    "rejected": {"fg": "red", "strikethrough": True},
}
_MARKS: Final = {"target": ("", ""), "accepted": ("{+", "+}"), "rejected": ("[-", "-]")}

_ABOUT: Final = "--show-drafts"


def refuse_drafts(engine_dir: Path, reader: "RequestReader") -> None:
    """Raises ConfigError: the engine has no drafts to show, or no tokenizer."""
    from dflash_trt.engine_dir import EngineDir

    engine = EngineDir.open(engine_dir)
    if engine.manifest.draft is None:
        hint = "Leave the option out, or build the engine with a drafter."
        raise ConfigError.about(_ABOUT, expected="an engine with a drafter", found="one without", hint=hint)
    if not engine.manifest.reports_drafts:
        expected, hint = "a backend that says which drafts it made", "Build the engine with another --backend."
        raise ConfigError.about(_ABOUT, expected=expected, found=engine.manifest.backend, hint=hint)
    if reader.codec is None:
        hint = "Build the engine from a target directory with a tokenizer."
        raise ConfigError.about(_ABOUT, expected="an engine with a tokenizer", found="one without", hint=hint)


def marked(texts: "Iterable[MarkedText]") -> str:
    """In colors on a terminal, else with marks."""
    if _has_colors():
        return "".join(click.style(text.shown, **_STYLES[text.origin]) for text in texts)
    return "".join(text.shown.join(_MARKS[text.origin]) for text in texts)


def marked_chunks(codec: "TextCodec") -> "Callable[[StreamChunk], str]":
    """The marked text of each chunk of one request."""
    from dflash_trt.serving.marked_texts import DraftMarker

    marker = DraftMarker(codec)

    def text_of(chunk: "StreamChunk") -> str:
        is_last = chunk.finish_reason is not None
        return marked([*marker.push(chunk.steps), *(marker.flush() if is_last else ())])

    return text_of


def _has_colors() -> bool:
    """See https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
