"""Sampling from foreign hands: command-line options, and the fields of an input row that override them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import click

from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.sampling import SAMPLING_FIELDS, SamplingField, SamplingParams

SAMPLING_NAMES = tuple(row.name for row in SAMPLING_FIELDS)


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
        flag = f"--{name.removesuffix('s')}"
        return click.option(
            flag, row.name, multiple=True, type=row.kind, metavar=metavar, help=f"{row.help} Repeatable."
        )
    return click.option(f"--{name}", type=row.kind, default=row.default, show_default=True, help=row.help)


def sampling_from_options(options: Mapping[str, Any]) -> SamplingParams:
    """Raises ConfigError: on the command line a wrong value is a usage error."""
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise ConfigError(str(error)) from error


def override(sampling: SamplingParams, row_fields: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with the fields a row brings, which must all be names of SAMPLING_NAMES.

    Raises:
        RequestError: wrong types or values, all of them in one error.
    """
    return replace(sampling, **row_fields)
