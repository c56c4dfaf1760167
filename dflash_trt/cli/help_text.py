"""Parts of commands: types and sets of options, what --help shows, defaults that a configuration file may replace."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from dflash_trt.core.config import BuildConfig


class Number(click.types.FloatParamType):
    """A finite number: click's own types take nan in every range, and inf where there is no maximum."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class NumberRange(Number, click.FloatRange):
    """A finite number within bounds."""


PATH: Final = click.Path(path_type=Path)
COUNT: Final = click.IntRange(min=1)
POSITIVE: Final = NumberRange(min=0, min_open=True)


def examples(*commands: str) -> str:
    """The epilog of a command; each example is a line, as it is typed."""
    lines = "\n".join(f"  {command}" for command in commands)
    return f"\b\nExample{'s' if len(commands) > 1 else ''}:\n{lines}"  # \b: click leaves the lines as they are


class OptionSet:
    """Options that belong together; a decorator that adds them to a command, in this order."""

    def __init__(self, *options: Callable[..., Any]) -> None:
        self._options = options

    def __call__(self, command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(self._options):
            command = option(command)
        return command

    @property
    def flags(self) -> dict[str, str]:
        """The flag of each by the name of its parameter."""
        return {str(param.name): param.opts[0] for param in click.command()(self(lambda: None)).params}

    def given(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The flags of those that were given."""
        return {name: flag for name, flag in self.flags.items() if values[name] not in (None, ())}


class LongCommand(click.Command):
    """A command with many options: `--help` shows the common ones, `--help-all` every option."""

    def __init__(self, *args: Any, common: str, **options: Any) -> None:
        """`common` are names of parameters, in the order of `--help`, with spaces between them."""
        super().__init__(*args, **options)
        self._common = common.split()
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_all,
                help="Show every option and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get(__name__):  # --help-all
            super().format_options(ctx, formatter)
            return
        params = {param.name: param for param in self.get_params(ctx)}
        shown = [params[name] for name in (*self._common, "help_all")]
        shown += [help_option] if (help_option := self.get_help_option(ctx)) is not None else []
        num_others = sum(isinstance(param, click.Option) for param in params.values()) - len(shown)
        records = [record for param in shown if (record := param.get_help_record(ctx)) is not None]
        with formatter.section(f"Common options ({num_others} more: {ctx.command_path} --help-all)"):
            formatter.write_dl(records)


def _print_all(context: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given:
        context.meta[__name__] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def with_default(help: str, name: str) -> str:
    """Help of a `build` option without a default of its own: the configuration file may have the value."""
    return f"{help}  [default: {_default(name)}]"


def _default(name: str) -> Any:
    default = BuildConfig.model_fields[name].default
    assert default is not None, name
    return default
