"""Untrusted sampling parameters: command-line options, and fields of input rows that override them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.sampling import GRAMMAR_FIELDS, SAMPLING_FIELDS, SamplingField, SamplingParams

SAMPLING_NAMES = tuple(row.name for row in SAMPLING_FIELDS)

_PLURAL = re.compile("(?<=id|rd)s$")


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of SamplingParams to a click command, under the names of its fields."""
    for row in reversed(SAMPLING_FIELDS):
        command = _option(row)(command)
    return command


def _option(row: SamplingField) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--top-k` of top_k; `--stop-token-id` of stop_token_ids, once for each."""
    name = row.name.replace("_", "-")
    if row.kind is bool:
        return click.option(f"--{name}", is_flag=True, help=row.help)
    if row.is_list:
        metavar = "TEXT" if row.kind is str else None
        flag = f"--{_PLURAL.sub('', name)}"
        return click.option(
            flag, row.name, multiple=True, type=row.kind, metavar=metavar, help=f"{row.help} Repeatable."
        )
    if row.reads_file:
        return click.option(
            f"--{name}", row.name, type=str, callback=_text_or_file, help=f"{row.help} @FILE reads a file."
        )
    return click.option(f"--{name}", type=row.kind, default=row.default, show_default=True, help=row.help)


def _text_or_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The text of FILE for @FILE."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value[1:]!r} cannot be read: {error}", ctx, param) from error


def sampling_from_options(options: Mapping[str, Any]) -> SamplingParams:
    """Raises ConfigError: on the command line a wrong value is a usage error."""
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise ConfigError(str(error)) from error


def override(sampling: SamplingParams, row_fields: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with the fields a row brings, which must all be names of SAMPLING_NAMES.

    What a row's text must be replaces what the texts of all rows must be.

    Raises:
        RequestError: wrong types or values, all of them in one error.
    """
    replaced = GRAMMAR_FIELDS if any(row_fields.get(name) for name in GRAMMAR_FIELDS) else ()
    none = {row.name: row.default for row in SAMPLING_FIELDS if row.name in replaced}
    return replace(sampling, **{**none, **row_fields})
