"""Every --help says what may be passed, what is taken without it, and ends with an example that works."""

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from dflash_trt.cli.build import build
from dflash_trt.cli.help_text import examples
from dflash_trt.cli.main import cli
from dflash_trt.core.config import BuildConfig
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.formats.registry import weight_formats

# One spelling for one thing, in every command that has it.
SAME = {
    "--input-file": "a file of rows",
    "--output-file": "a file of results",
    "--trace-file": "a file of steps",
    "--output": "a directory to write",
    "--config": "a file of build",
    "--max-new-tokens": "the length of a text",
}
OTHER_SPELLINGS = {"--prompts", "--input", "--trace", "--out", "--output-dir", "--max-tokens", "--force", "--precision"}


def commands(command: click.Command = cli, *path: str) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(("dflash-trt", *path)), command
    if isinstance(command, click.Group):
        for name, part in command.commands.items():
            yield from commands(part, *path, name)


COMMANDS = dict(commands())
OPTIONS = [
    pytest.param(name, option, id=f"{name} {option.opts[0]}")
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_text_ends_with_an_example_that_the_command_takes(name: str) -> None:
    epilog = COMMANDS[name].epilog or ""
    lines = [line.strip() for line in epilog.splitlines() if line.startswith("  dflash-trt ")]
    assert lines and epilog.endswith(lines[-1])
    for line in lines:
        command, words = cli, shlex.split(line)[1:]
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        command.make_context("test", words)
        assert line.startswith(name)
    assert help_of(COMMANDS[name]).rstrip().endswith(f"\n    {lines[-1]}"), "on a line of its own"


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_says_its_meaning_and_its_default(name: str, option: click.Option) -> None:
    assert option.help
    has_default = option.default not in (None, (), False) and "UNSET" not in repr(option.default)
    assert not has_default or option.show_default, "a default that nobody sees"
    is_flag_of_two = option.is_flag and option.secondary_opts
    assert not is_flag_of_two or "default" in option.help


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_has_the_spelling_of_all_commands(name: str, option: click.Option) -> None:
    assert not OTHER_SPELLINGS & {*option.opts, *option.secondary_opts}
    if isinstance(option.type, click.Path) and "file" in str(option.name):
        assert option.opts[0] in SAME


# Checked with other numbers of theirs: each has a test that a wrong one is refused.
CHECKED = {*BuildConfig.model_fields, *SamplingParams.__dataclass_fields__}
CHECKED |= {"instances", "default_max_new_tokens", "drain_timeout"}  # of ModelSettings and Deployment
GATES = {"max_kl", "min_acceptance_ratio", "min_agreement"}  # any number is a bound


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_a_number_has_bounds(name: str, option: click.Option) -> None:
    is_plain = isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
    is_bounded = isinstance(option.type, click.IntRange | click.FloatRange)
    assert not is_plain or is_bounded or option.name in GATES or (option.name in CHECKED and "bench" not in name)


def checks_itself(name: str, option: click.Option) -> bool:
    """Settings and sampling parameters are checked with all that is wrong of them."""
    is_of_requests = option.name in SamplingParams.__dataclass_fields__ and "bench" not in name
    return is_of_requests or option.name in RuntimeConfig.model_fields


@pytest.mark.parametrize(
    ("name", "option"),
    [
        each
        for each in OPTIONS
        if isinstance(each.values[1].type, click.types.FloatParamType) and not checks_itself(*each.values)
    ],
)
def test_a_number_is_finite(name: str, option: click.Option) -> None:
    for text in ("nan", "inf", "-inf"):
        with pytest.raises(click.BadParameter):
            option.type.convert(text, option, None)


@pytest.mark.parametrize("option", ["--rounds", "--max-new-tokens", "--concurrency"])
@pytest.mark.parametrize("name", ["speedup", "serve", "throughput"])
def test_nothing_is_measured_no_times(name: str, option: str) -> None:
    result = CliRunner().invoke(cli, ["bench", name, "engine", option, "0"])
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.stderr


def test_options_of_build_show_the_default_of_their_key() -> None:
    text = " ".join(help_of(build).split())
    for name, field in BuildConfig.model_fields.items():
        if isinstance(field.default, str | int) and field.default not in ("", False):
            option = next(param for param in build.params if param.name == name)
            assert f"[default: {field.default}]" in str(getattr(option, "help", ""))
    assert "[float32|bfloat16|float16]" in text and "[torch|tensorrt|tensorrt_llm]" in text


def test_bounds_of_settings_are_shown() -> None:
    shown = CliRunner().invoke(COMMANDS["dflash-trt run"], ["--help-all"]).output
    text = " ".join(shown.split())
    for flag, bounds in (("kv-cache-free-memory-fraction", "0<x<=1"), ("num-threads", "x>=1")):
        _, _, shown = text.partition(f"--{flag} ")
        assert f"[{bounds}]" in shown.partition(" --")[0], flag


def test_build_names_every_weight_format() -> None:
    (option,) = (param for param in build.params if param.name == "quantization")
    assert isinstance(option, click.Option)
    named = str(option.help).partition(": ")[2].partition(".")[0].replace(" or ", ", ").split(", ")
    assert set(named) == {"none", *weight_formats()}


def test_an_example_is_not_wrapped() -> None:
    assert examples("a", "b") == "\b\nExamples:\n  a\n  b"


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command, info_name="test", max_content_width=120, terminal_width=120))
