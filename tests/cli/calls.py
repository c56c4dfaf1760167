"""Commands up to the call that does the work: which arguments it gets."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click

from dflash_trt.core.errors import DFlashError


class RecordedError(DFlashError):
    """The call was made; nothing runs. A command ends by it as by any other error."""


class Recorder:
    """Takes the place of `function`. `arguments` are those of its call, defaults included, under their names.

    A parameter that `function` gains is in `arguments` at once, so that a test that compares all of them fails.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._signature = inspect.signature(function)
        self.arguments: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        self.arguments = dict(call.arguments)
        raise RecordedError("recorded")


def options_never_set(command: click.Command, minimal: Sequence[str], *cases: Sequence[str]) -> set[str]:
    """Parameters of `command` that no case gives another value than `minimal` does."""
    with command.make_context("test", [*minimal]) as context:
        default = context.params
    found = set(default)
    for words in cases:
        with command.make_context("test", [*words]) as context:
            found -= {name for name, value in context.params.items() if value != default[name]}
    return found
