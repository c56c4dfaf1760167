"""The pages of the documentation, taken apart: code blocks, code spans, links, headings, tables."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
_SHELL = ("bash", "console")


@dataclass(frozen=True)
class Command:
    """One command of a shell block. `output` is what the page says that it prints; empty for a bash block."""

    text: str
    output: str = ""


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Page:
    name: str
    text: str

    @classmethod
    def read(cls, name: str) -> "Page":
        return cls(name, (ROOT / name).read_text())

    @cached_property
    def _tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def _inline(self) -> list[Token]:
        return [child for token in self._tokens for child in token.children or ()]

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and text of each code block; "" for one that is indented or has none."""
        return [(token.info, token.content) for token in self._tokens if token.type in ("fence", "code_block")]

    @property
    def code_spans(self) -> list[str]:
        return [token.content for token in self._inline if token.type == "code_inline"]

    @property
    def links(self) -> list[str]:
        return [str(token.attrs["href"]) for token in self._inline if token.type == "link_open"]

    @property
    def anchors(self) -> set[str]:
        """Of the headings, made as GitHub makes them."""
        titles = (self._tokens[i + 1].content for i, token in enumerate(self._tokens) if token.type == "heading_open")
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    @property
    def tables(self) -> list[Table]:
        found: list[Table] = []
        rows: list[list[str]] = []
        for i, token in enumerate(self._tokens):
            match token.type:
                case "table_open":
                    rows = []
                case "tr_open":
                    rows.append([])
                case "th_open" | "td_open":
                    rows[-1].append(self._tokens[i + 1].content)
                case "table_close":
                    found.append(Table(rows[0], rows[1:]))
        return found

    @property
    def commands(self) -> list[Command]:
        return [
            command for language, text in self.blocks if language in _SHELL for command in _commands(language, text)
        ]


def _commands(language: str, text: str) -> Iterator[Command]:
    """A bash block holds commands alone; in a console block they begin with "$ " and their output follows."""
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        command = line.removeprefix("$ ")
        while not _is_complete(command):
            command = f"{command.removesuffix(chr(92))}\n{lines.pop(0)}"
        output = []
        while language == "console" and lines and not lines[0].startswith("$ "):
            output.append(lines.pop(0))
        for part in _split(command):
            yield Command(part, "\n".join(output))


def _is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # an open quotation
        return False
    return not command.endswith("\\")


def _split(command: str) -> list[str]:
    return [part.strip() for part in command.split("&&")]


PAGES = [
    Page.read(name)
    for name in (
        "README.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
        "plugins/README.md",
    )
]
