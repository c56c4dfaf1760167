import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import dflash_trt.cli.main
from dflash_trt.cli.bench import bench
from dflash_trt.cli.main import cli
from dflash_trt.core.errors import BuildError, ConfigError, DFlashError

HEAVY = ("torch", "tensorrt", "modelopt", "transformers")


@pytest.mark.parametrize("statement", ["import dflash_trt", "import dflash_trt.cli.main"])
def test_import_loads_none_of_the_heavy_dependencies(statement: str) -> None:
    assert _loaded_after(f"{statement}; failed = None") == []


@pytest.mark.parametrize("words", [["--help"], ["build", "--help"], ["run", "-h"], ["inspect", "-h"], ["--version"]])
def test_help_loads_none_of_the_heavy_dependencies(words: list[str]) -> None:
    call = (
        f"from dflash_trt.cli.main import cli\ntry: cli.main({words})\nexcept SystemExit as end: assert end.code == 0"
    )
    assert _loaded_after(call) == []


LONG = {
    **{name: cli.commands[name] for name in ("run", "plan", "serve", "worker")},
    **{f"bench {name}": bench.commands[name] for name in ("serve", "speedup")},
}


@pytest.mark.parametrize("command", LONG.values(), ids=LONG)
def test_help_fits_two_screens_and_counts_the_options_that_help_all_shows(command: click.Command) -> None:
    runner = CliRunner()
    short, full = (runner.invoke(command, [flag], terminal_width=80).output for flag in ("--help", "--help-all"))
    options = [param.opts[0] for param in command.params if isinstance(param, click.Option)]
    is_shown = [any(line.startswith(f"  {option} ") for line in short.splitlines()) for option in options]
    assert all(any(line.startswith(f"  {option}") for line in full.splitlines()) for option in options)
    assert f"({is_shown.count(False)} more: {command.name} --help-all)" in short
    assert len(short.splitlines()) <= 70


def test_inspect_needs_no_torch(engine_dir) -> None:
    call = f"from dflash_trt.cli.main import cli\ntry: cli.main(['inspect', {str(engine_dir)!r}])\n"
    assert _loaded_after(call + "except SystemExit as end: assert end.code == 0") == []


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("key 'x': expected a, found b. Mend it."), 2),
        (BuildError("output: expected a, found b. Mend it."), 1),
        (PermissionError(13, "Permission denied", "/some/file"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_ends_in_one_message_and_its_exit_code(monkeypatch, invoke, error, exit_code) -> None:
    @click.command("fail")
    def fail() -> None:
        raise error

    monkeypatch.setitem(dflash_trt.cli.main.cli.commands, "fail", fail)
    result = invoke("fail")
    assert result.exit_code == exit_code
    assert result.stdout == ""
    message = str(error) if isinstance(error, DFlashError) else ""
    assert result.stderr.lstrip("\n").startswith("error: ")  # click breaks the line of a Ctrl-C
    assert result.stderr.strip().count("\n") == 0
    assert message in result.stderr


def test_a_bug_is_not_hidden(monkeypatch, invoke) -> None:
    @click.command("fail")
    def fail() -> None:
        raise AssertionError("a bug")

    monkeypatch.setitem(dflash_trt.cli.main.cli.commands, "fail", fail)
    with pytest.raises(AssertionError, match="a bug"):
        invoke("fail")


def test_an_unknown_option_is_a_usage_error(invoke) -> None:
    result = invoke("run", "engine", "--temprature", "1")
    assert result.exit_code == 2
    assert "--temperature" in result.stderr


def test_version_is_the_packages(invoke) -> None:
    assert dflash_trt.__version__ in invoke("--version").stdout


def _loaded_after(code: str) -> list[str]:
    """Which heavy modules a fresh interpreter has loaded after running `code`."""
    report = f"\nimport sys, json\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_a_command_that_imported_triton_ends_without_complaints_of_its_bindings() -> None:
    code = "import sys, triton; from dflash_trt.cli.main import main; sys.argv = ['dflash-trt', '--version']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
