"""A terminal says what it waits for, and forgets it; a file or a pipe never sees it."""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from dflash_trt.cli.main import cli
from dflash_trt.cli.status_line import status_line


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """What is left to see of each line."""
        lines = []
        for line in self.getvalue().split("\n"):
            row = ""
            for part in line.split("\r"):
                row = part + row[len(part) :]
            lines.append(row.rstrip())
        return lines


def run(engine_dir: Path, stderr: StringIO) -> int:
    with redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        cli.main(["run", str(engine_dir), "--prompt", "Hello", "--max-new-tokens", "2"])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_terminal_shows_what_it_waits_for_and_keeps_no_trace_of_it(engine_dir: Path) -> None:
    terminal = Terminal()
    assert run(engine_dir, terminal) == 0
    assert terminal.getvalue().startswith(f"opening {engine_dir}"[:60])
    assert not any("opening" in line for line in terminal.screen)
    assert any(line.startswith("K/V:") for line in terminal.screen)


def test_an_error_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    terminal = Terminal()
    assert run(tmp_path, terminal) == 1
    assert "opening" in terminal.getvalue() and "opening" not in "".join(terminal.screen)
    assert any("engine directory" in line for line in terminal.screen)


def test_a_pipe_gets_no_status_line(engine_dir: Path) -> None:
    pipe = StringIO()
    assert run(engine_dir, pipe) == 0
    assert "opening" not in pipe.getvalue() and "\r" not in pipe.getvalue()


def test_a_line_longer_than_the_terminal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped line could not be wiped."""
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    with redirect_stderr(terminal), status_line("opening " + "x" * 50):
        assert terminal.getvalue() == "opening " + "x" * 11
    assert terminal.screen == [""]
