"""Options and commands of other engines, typed here: the one that does the same, or a sentence."""

from collections.abc import Iterator, Sequence

import click

from dflash_trt.core.config import BuildConfig
from dflash_trt.core.other_engines import COMMANDS, NAMES, VALUES, Answer, field_of
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SAMPLING_FIELDS

_OFTEN_MEANT = ("build", "run", "serve")
_OUR_FIELDS = {*BuildConfig.model_fields, *RuntimeConfig.model_fields, *(row.name for row in SAMPLING_FIELDS)}


class Group(click.Group):
    """A group that knows the commands of other engines."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in COMMANDS and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command '{args[0]}'. Use {COMMANDS[args[0]]}.")
        return super().resolve_command(ctx, args)


class Choice(click.Choice[str]):
    """A choice that knows how other engines spell its values."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        ours = VALUES.get(value)
        if ours in self.choices:
            self.fail(f"'{value}' is not one of {', '.join(self.choices)}. Did you mean '{ours}'?", param, ctx)
        return super().convert(value, param, ctx)


def answered(error: click.NoSuchOption, words: Sequence[str]) -> click.UsageError:
    """The error with a hint, if the option belongs to another engine or another command."""
    if error.ctx is None:
        return error
    typed = [word.partition("=")[0] for word in words]
    # For `-tp`, click reports `-t`.
    for word in [word for word in typed if word == error.option_name or word[:2] == error.option_name]:
        if (hint := _hint(field_of(word), error.ctx)) is not None:
            return click.UsageError(f"No such option '{word}'. {hint}", error.ctx)
    return error


def _hint(name: str, ctx: click.Context) -> str | None:
    here = _shown_names(ctx.command)
    answer = NAMES.get(name)
    if answer is None and (name in here or name in _OUR_FIELDS):
        answer = Answer(ours=(name,))
    if answer is None:
        return None
    places = [("", here)] + [(f"dflash-trt {path}", _shown_names(command)) for path, command in _all_commands(ctx)]
    for path, shown in places:
        found = next((shown[ours] for ours in answer.ours if ours in shown), None)
        if found is not None:
            where = f"`{path} {found}` sets it." if path else f"Use {found}."
            return f"{where} {answer.sentence}".strip()
    return answer.sentence or None


def _shown_names(command: click.Command) -> dict[str, str]:
    """Options and arguments of a command by all names that they have, as they are typed."""
    shown = {}
    for param in command.params:
        if isinstance(param, click.Argument):
            shown[str(param.name)] = f"the argument {param.metavar}"
            continue
        flag = next((opt for opt in param.opts if opt.startswith("--")), param.opts[0])
        shown |= {str(param.name): flag} | {field_of(opt): opt for opt in (*param.opts, *param.secondary_opts)}
    return shown


def _all_commands(ctx: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Every command by its path, those first that are often meant."""
    root = ctx.find_root().command
    assert isinstance(root, click.Group)
    yield from sorted(_below(root), key=lambda item: item[0] not in _OFTEN_MEANT)


def _below(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _below(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command
