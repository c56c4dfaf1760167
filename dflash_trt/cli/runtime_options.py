"""The options of RuntimeConfig, with the same names and help for every command that opens an engine."""

import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args, get_origin

import click

from dflash_trt.cli.other_engines import Choice
from dflash_trt.core.draft_lengths import lengths_text
from dflash_trt.core.runtime_config import NODES, Option, RuntimeConfig, bound, option_of, reads_text, value_type


def runtime_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds an option for each field of RuntimeConfig, except for those that the command decides itself."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(RuntimeConfig.model_fields):
            if name not in without:
                command = _click_option(name, option_of(name))(command)
        return command

    return add


def runtime_from_options(options: dict[str, Any]) -> RuntimeConfig:
    """Pop the runtime's options from a command's options.

    Raises:
        ConfigError: options that exclude each other, all of them in one error.
    """
    fields: dict[str, Any] = {}
    for name, field in RuntimeConfig.model_fields.items():
        given = options.pop(flag_of(name).removeprefix("--").replace("-", "_"), None)
        is_switch = isinstance(field.default, bool)
        if given is None or (is_switch and not given):
            continue
        fields[name] = not field.default if is_switch else given
    return RuntimeConfig.model_validate(fields, context={name: flag_of(name) for name in RuntimeConfig.model_fields})


def flag_of(name: str) -> str:
    """The flag of an option's parameter, which for a field of RuntimeConfig may have another name."""
    flag = option_of(name).flag if name in RuntimeConfig.model_fields else None
    return flag or f"--{name.replace('_', '-')}"


def settings_line(config: RuntimeConfig) -> str:
    """Settings of an opened engine as the options that ask for them, without what is left to the engine."""
    return f"settings: {' '.join(_typed(name, value) for name, value in config if _is_told(name, value))}"


def _is_told(name: str, value: object) -> bool:
    is_default = value == RuntimeConfig.model_fields[name].default
    return value is not None and not (is_default and (name in NODES or value_type(name) is bool))


def _typed(name: str, value: object) -> str:
    """`value` as it is typed."""
    flag = flag_of(name)
    if isinstance(value, bool):
        is_pair = RuntimeConfig.model_fields[name].default is None
        return f"--no-{flag.removeprefix('--')}" if is_pair and not value else flag
    return f"{flag} {lengths_text(value) if isinstance(value, Mapping) else shlex.quote(str(value))}"


def _click_option(name: str, option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    default = RuntimeConfig.model_fields[name].default
    kinds: Mapping[Any, Any] = {int: click.IntRange, float: click.FloatRange}
    kind = value_type(name)
    if kind is bool:
        flag = flag_of(name)
        if default is None:
            return click.option(f"{flag}/--no-{flag.removeprefix('--')}", default=None, help=option.help)
        return click.option(flag, is_flag=True, help=option.help)
    if get_origin(kind) is Literal:
        choice = Choice(get_args(kind))
        return click.option(flag_of(name), type=choice, default=default, show_default=True, help=option.help)
    if reads_text(name):
        return click.option(flag_of(name), metavar=option.metavar, help=option.help)
    min_value, above, max_value = bound(name, "ge"), bound(name, "gt"), bound(name, "le")
    limits = {"min": above if min_value is None else min_value, "min_open": min_value is None}
    if kind is float:
        limits["max"] = max_value
    return click.option(flag_of(name), type=kinds[kind](**limits), metavar=option.metavar, help=option.help)
