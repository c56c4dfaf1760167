"""Sampling from foreign hands: command-line options, and the fields of an input row that override them."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import click

from dflash_trt.core.errors import ConfigError, RequestError
from dflash_trt.core.request import SamplingParams

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))

_OPTIONS = (
    click.option("--max-new-tokens", type=int, help="Tokens to generate at most (default: 128)."),
    click.option("--temperature", type=float, help="0 is greedy, the default."),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 is off."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this probability; 1 is off."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest; 0 is off."),
    click.option(
        "--seed",
        type=int,
        help="Fixes the random numbers (default: drawn for each request). K and batch mates change roundings: "
        "practically no text in float32 on a CPU, many in bfloat16, FP8 and FP4.",
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this string; repeatable."),
    click.option(
        "--stop-token-id", "stop_token_ids", multiple=True, type=int, help="Stop after this token; repeatable."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
    click.option("--logprobs", is_flag=True, help="Give the log-probability of every token of the output."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of SamplingParams to a click command, under the names of its fields."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_from_options(options: Mapping[str, Any]) -> SamplingParams:
    """Raises ConfigError: on the command line a wrong value is a usage error."""
    try:
        return SamplingParams(**{name: value for name, value in options.items() if value is not None})
    except RequestError as error:
        raise ConfigError(str(error)) from error


def override(sampling: SamplingParams, row_fields: Mapping[str, Any]) -> SamplingParams:
    """`sampling` with the fields a row brings, which must all be names of SAMPLING_FIELDS.

    Raises:
        RequestError: wrong types or values, all of them in one error.
    """
    return replace(sampling, **row_fields)
