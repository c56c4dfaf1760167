"""Every exit code of the table, provoked."""

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.core.errors import BuildError, CapacityError, ConfigError, DFlashError, RequestError
from dflash_trt.core.exit_codes import ExitCode
from tests.docs.pages import Page

DFLASH_TRT = [sys.executable, "-m", "dflash_trt.cli.main"]


def ended(*words: str | Path) -> int:
    return subprocess.run([*DFLASH_TRT, *map(str, words)], capture_output=True, check=False).returncode


def signalled(number: int, engine: Path, rows: Path) -> int:
    """The signal comes while rows are printed."""
    rows.write_text((json.dumps({"prompt": "def f"}) + "\n") * 2000)
    words = ["run", str(engine), "--input-file", str(rows), "--max-new-tokens", "40", "--ignore-eos"]
    with subprocess.Popen([*DFLASH_TRT, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        process.communicate()
    return process.returncode


def missed_gate(engine: Path, rows: Path) -> int:
    rows.write_text('{"prompt": "def f"}\n')
    gate = ["--max-new-tokens", "2", "--min-acceptance-ratio", "2"]
    return ended("eval", engine, "--against", engine, "--input-file", rows, *gate)


PROVOKED: list[tuple[ExitCode, Callable[[Path, Path], int]]] = [
    (ExitCode.DONE, lambda engine, path: ended("run", engine, "--prompt", "a", "--max-new-tokens", "1")),
    (ExitCode.FAILED, lambda engine, path: ended("inspect", path / "none")),
    (ExitCode.USAGE, lambda engine, path: ended("run", engine, "--temprature", "1")),
    (ExitCode.USAGE, lambda engine, path: ended("run", engine, "--prompt", "a", "--draft-length", "9")),
    (ExitCode.REQUEST_FAILED, lambda engine, path: ended("run", engine, "--prompt", "")),
    (ExitCode.REQUEST_FAILED, lambda engine, path: missed_gate(engine, path / "rows.jsonl")),
    (ExitCode.INTERRUPTED, lambda engine, path: signalled(signal.SIGINT, engine, path / "rows.jsonl")),
    (ExitCode.TERMINATED, lambda engine, path: signalled(signal.SIGTERM, engine, path / "rows.jsonl")),
]


@pytest.mark.parametrize(("code", "provoke"), PROVOKED)
def test_each_exit_code_comes(
    engine_dir: Path, tmp_path: Path, code: ExitCode, provoke: Callable[[Path, Path], int]
) -> None:
    assert provoke(engine_dir, tmp_path) == code


# As the console script, but that a signal arrives during the import of a command.
INTERRUPTED_IMPORT = """
import importlib, os, signal, sys, time

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "dflash_trt.cli.build":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
module, name = sys.argv[1].split(":")
getattr(importlib.import_module(module), name)()
"""


def test_a_signal_during_imports_ends_in_one_line() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    words = [sys.executable, "-c", INTERRUPTED_IMPORT, project["scripts"]["dflash-trt"], "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "error: interrupted\n")


def test_no_exit_code_is_left_out_here() -> None:
    """A model that ends alone is in tests/triton_server/test_model.py."""
    assert {code for code, _ in PROVOKED} == set(ExitCode) - {ExitCode.ENGINE_LOST}


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError, 2), (RequestError, 3), (BuildError, 1), (CapacityError, 1), (DFlashError, 1)]
)
def test_an_error_has_the_exit_code_of_its_kind(error: type[DFlashError], code: int) -> None:
    assert error("x").exit_code == code


def test_the_page_has_every_code_once() -> None:
    (table,) = Page.read("docs/exit_codes.md").tables
    assert [(row[0], row[2]) for row in table.rows] == [(str(int(code)), code.meaning) for code in ExitCode]
