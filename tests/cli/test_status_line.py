"""A terminal says what it waits for, and forgets it; a file or a pipe never sees it. A log record has its own line."""

import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from dflash_trt.backends.torch.native import build, library
from dflash_trt.cli.main import cli
from dflash_trt.cli.status_line import notices_shown, status_line


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


def test_a_line_that_is_wiped_leaves_nothing_to_wipe_and_nothing_to_return_from() -> None:
    terminal = Terminal()
    with redirect_stderr(terminal), status_line("opening") as line:
        line.wipe()
        wiped = terminal.getvalue()
        line.wipe()
        assert terminal.getvalue() == wiped
        line.show("reading")
        assert terminal.getvalue() == f"{wiped}reading"


def test_bytes_read_have_a_unit_and_are_shown_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [5.0]
    monkeypatch.setattr("dflash_trt.cli.status_line.time.monotonic", lambda: now_s[0])
    for num_bytes, shown in ((2_500_000_000, "2.5 GB"), (1_000_000_000, "1.0 GB"), (999_000_000, "999.0 MB")):
        terminal = Terminal()
        with redirect_stderr(terminal), status_line("opening a very long name of an engine") as line:
            for num_read, wait_s in ((0, 0), (num_bytes // 2, 0.09), (num_bytes // 5, 0.02), (num_bytes, 0)):
                now_s[0] += wait_s
                line.show_read(num_read, num_bytes)
                part = "0.0" if num_read < num_bytes // 5 else f"{float(shown.split()[0]) / 5:.1f}"
                expected = shown.split()[0] if num_read == num_bytes else "0.0" if num_read > num_bytes // 4 else part
                assert terminal.screen == [f"reading weights: {expected} of {shown}"]
        assert terminal.screen == [""]


@pytest.fixture
def _no_library_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache of CPU kernels, and a compiler that only fails."""
    try:
        build.instruction_sets()
    except build.UnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    library.cpu_kernels.cache_clear()
    yield
    library.cpu_kernels.cache_clear()


@pytest.mark.usefixtures("_no_library_yet")
@pytest.mark.parametrize("stderr", [StringIO(), Terminal()], ids=["a pipe", "a terminal"])
def test_a_run_says_that_it_compiles_and_what_is_slow_without(engine_dir: Path, stderr: StringIO) -> None:
    assert run(engine_dir, stderr) == 0
    lines = stderr.screen if isinstance(stderr, Terminal) else stderr.getvalue().splitlines()
    assert [line for line in lines if "CPU kernels" in line] == [
        f"compiling the CPU kernels into {build._cache_dir()}, once; this takes some seconds",
        "the CPU kernels are not used, and PyTorch takes up to twice as long: /bin/false failed: exit code 1",
    ]


def test_what_is_logged_is_shown_in_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log, pipe = logging.getLogger("dflash_trt.anything"), StringIO()
    level, package = logging.ERROR, logging.getLogger("dflash_trt")
    monkeypatch.setattr(package, "level", level)  # another than the block's
    with redirect_stderr(pipe):
        with notices_shown():
            log.info("now")
            log.debug("never")
        log.info("too late")
        log.warning("too late, too")
    assert pipe.getvalue() == "now\n"
    assert package.level == level
