"""A hook of mkdocs.yml: the Commands page shows the defaults that `--help` shows.

mkdocs-click prints `option.default`, which in click 8.5 is a sentinel where there is none, and may be a path of this
machine.
"""

from collections.abc import Iterator
from typing import Any

import click

from dflash_trt.cli.main import cli


def on_pre_build(**_: Any) -> None:
    for option in _options(cli):
        if isinstance(option.show_default, str):
            option.default = option.show_default
        elif not isinstance(option.default, bool | int | float | str | tuple | list):
            option.default = None


def _options(command: click.Command) -> Iterator[click.Option]:
    """All options of the command and of those below it, `--help` included."""
    parameters = command.get_params(click.Context(command))
    yield from (parameter for parameter in parameters if isinstance(parameter, click.Option))
    for each in getattr(command, "commands", {}).values():
        yield from _options(each)
