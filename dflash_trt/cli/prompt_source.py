"""The prompts of `run`, `eval` and every bench: a JSONL file, stdin, or a Hugging Face data set on this disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.data_sets import columns_of, is_data_set, rows_of_data_set
from dflash_trt.cli.help_text import COUNT, PATH, OptionSet
from dflash_trt.cli.prompts import MAX_LISTED_ROWS, Defaults, InputRow, Job, Refusal, decoded_row, row_of
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import SamplingParams

STDIN_NAME = Path("-")
NAMES = ("input_file", "columns", "split", "categories", "num_prompts")


def prompt_options(*, default: Path | None = None, shown: str | None = None, required: bool = False) -> OptionSet:
    """The options of a PromptSource; `default` is the file without --input-file, and `shown` its description."""
    return OptionSet(
        click.option(
            "--input-file",
            type=PATH,
            default=default,
            show_default=shown or False,
            required=required,
            help="JSONL rows, '-' for stdin, or a data set on this disk (Parquet, Arrow, or its directory).",
        ),
        click.option(
            "--column",
            "columns",
            multiple=True,
            metavar="FIELD=COLUMN",
            help="Column of a field, such as prompt=text: only these columns are read; repeatable.",
        ),
        click.option("--split", metavar="NAME", help="Split of the data set, for example qualitative/test."),
        click.option(
            "--category",
            "categories",
            multiple=True,
            metavar="NAME",
            help="Use only rows of this category; repeatable.",
        ),
        click.option("--num-prompts", type=COUNT, help="Use only the first N rows.  [default: all]"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """A file of rows, the columns to read by field (by default all), and which rows are wanted."""

    path: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    split: str | None = None
    categories: tuple[str, ...] = ()
    num_prompts: int | None = None

    @classmethod
    def of_options(cls, options: Mapping[str, Any]) -> PromptSource:
        """From the options of `prompt_options`. Raises ConfigError."""
        path, columns, split, categories, num_prompts = (options[name] for name in NAMES)
        found = columns_of(columns)
        return cls(path=path, columns=found, split=split, categories=tuple(categories), num_prompts=num_prompts)

    def rows(self, defaults: Defaults, *, takes_turns: bool = False) -> list[InputRow]:
        """The wanted rows in order; a row that is wrong is a Refusal, and is wanted.

        Without `takes_turns` a row with several turns is wrong.

        Raises:
            ConfigError: the file cannot be read, or has no such column or category, or no row.
        """
        rows = [row_of(number, fields, defaults) for number, fields in self._fields()]
        known = {row.category for row in rows if isinstance(row, Job)}
        for name in self.categories:
            if name not in known:
                found = ", ".join(sorted(filter(None, known))) or "none"
                raise ConfigError.about(f"--category {name}", expected=f"a category of {self.path}", found=found)
        if self.categories:
            rows = [row for row in rows if isinstance(row, Refusal) or row.category in self.categories]
        if not rows:
            hint = 'Write one JSON object per line, for example {"prompt": "Hello"}.'
            raise ConfigError.about(str(self.path), expected="at least one prompt", found="none", hint=hint)
        return [row if takes_turns else _of_one_turn(row) for row in rows[: self.num_prompts]]

    def jobs(self, sampling: SamplingParams | None = None, *, takes_turns: bool = False) -> list[Job]:
        """Rows for a measurement, which must not skip wrong ones.

        Categories alternate, so that a measurement that takes few rows has a share of each.

        Raises:
            ConfigError: as `rows` does, or for a wrong row among those.
        """
        everything = replace(self, num_prompts=None)
        by_category: dict[str | None, list[InputRow]] = {}
        for row in everything.rows(Defaults(sampling=sampling or SamplingParams()), takes_turns=takes_turns):
            by_category.setdefault(row.category if isinstance(row, Job) else None, []).append(row)
        alternating = [row for group in zip_longest(*by_category.values()) for row in group if row is not None]
        chosen = alternating[: self.num_prompts]
        refused = [f"{row.row_id}: {row.error}" for row in chosen if isinstance(row, Refusal)]
        raise_all(ConfigError, str(self.path), refused[:MAX_LISTED_ROWS])
        return [row for row in chosen if isinstance(row, Job)]

    def _fields(self) -> Iterator[tuple[int, Any]]:
        """Fields of each row by its number, or a Refusal. Raises ConfigError."""
        if is_data_set(self.path):
            rows = rows_of_data_set(self.path, columns=self.columns, split=self.split)
            for number, fields in enumerate(rows, start=1):
                _check_plain(fields, f"{self.path}, row {number}")
                yield number, fields
            return
        if self.split is not None:
            raise ConfigError.about("--split", expected="a directory of a data set", found=str(self.path))
        found = [(number, decoded_row(number, line)) for number, line in self._lines() if line.strip()]
        yield from self._chosen(found) if self.columns else found

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        try:
            text = sys.stdin.buffer.read() if self.path == STDIN_NAME else self.path.read_bytes()
        except OSError as error:
            found, hint = str(error.strerror).lower(), 'Pass one JSON object per line, for example {"prompt": "Hello"}.'
            expected = "a JSONL file or a data set"
            raise ConfigError.about(str(self.path), expected=expected, found=found, hint=hint) from error
        return enumerate(text.split(b"\n"), start=1)

    def _chosen(self, rows: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The wanted columns of rows, under the names of their fields."""
        known = dict.fromkeys(name for _, fields in rows if isinstance(fields, dict) for name in fields)
        missing = [column for column in self.columns.values() if column not in known]
        if missing and known:
            expected, found = f"a column {', '.join(missing)}", ", ".join(known)
            hint = "Name it, for example --column prompt=text."
            raise ConfigError.about(str(self.path), expected=expected, found=found, hint=hint)
        for number, fields in rows:
            if isinstance(fields, dict):
                named = {name: fields.get(column) for name, column in self.columns.items()}
                yield number, {name: value for name, value in named.items() if value is not None}
            else:
                yield number, fields  # to be refused


def _of_one_turn(row: InputRow) -> InputRow:
    if isinstance(row, Refusal) or not row.later_turns:
        return row
    hint = "Measure conversations with `bench speedup` or `bench serve`, or pass messages with their answers."
    found = str(1 + len(row.later_turns))
    return Refusal(row_id=row.row_id, error=problem("turns", expected="one turn", found=found, hint=hint))


def _check_plain(fields: Mapping[str, Any], subject: str) -> None:
    """Raises ConfigError for values that JSON does not have, such as bytes and dates."""
    try:
        json.dumps(fields)
    except TypeError as error:
        hint = "Read other columns with --column."
        raise ConfigError.about(subject, expected="text, numbers, lists", found=str(error), hint=hint) from error
