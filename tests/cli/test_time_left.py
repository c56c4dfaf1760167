"""How far a command is: numbered lines, status lines on a terminal, and lines of long stages in a pipe."""

from collections.abc import Callable
from contextlib import redirect_stderr

import pytest

from dflash_trt.cli import time_left
from dflash_trt.cli.time_left import Countdown, StageLines, TimeLeft, duration
from tests.cli.test_status_line import Terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""
    now = [0.0]
    monkeypatch.setattr(time_left.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_steps_are_numbered_and_the_last_has_no_time_left(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = TimeLeft()
    clock(30)
    progress(1, 3, "first")
    clock(90)
    progress(3, 3, "last")
    assert capsys.readouterr().err == "[1/3] first, about 1 min 0 s left\n[3/3] last\n"


def test_a_pipe_hears_of_a_long_stage_every_ten_seconds(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = StageLines()
    lines.show("checking", 0, 0, "")
    for seconds in (1, 9, 12, 15, 21.5, 23):
        clock(seconds)
        lines.show("writing weights", seconds - 1, 100, f"{seconds - 1:g} of 100 GB")
    assert capsys.readouterr().err.splitlines() == [
        "checking ...",
        "writing weights ...",
        "writing weights: 11 of 100 GB, about 1 min 29 s left",
        "writing weights: 22 of 100 GB, about 1 min 18 s left",
    ]


def test_a_terminal_has_one_line_that_is_wiped(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        countdown = Countdown("requests")
        clock(2)
        countdown.show(1, 4, "1/4")
        assert terminal.getvalue() == "requests: 1/4, about 6 s left"
        countdown.wipe()
    assert terminal.getvalue().endswith(" \r")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_times_are_told_in_their_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_each_unit_begins_where_the_one_before_ends() -> None:
    times = {59.4: "59 s", 59.6: "1 min 0 s", 3599: "59 min 59 s", 3600: "1 h 0 min", 3661: "1 h 1 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_a_stage_that_has_not_begun_or_is_beyond_its_total_says_nothing(clock: Callable[[float], None]) -> None:
    terminal = Terminal()
    with redirect_stderr(terminal):
        countdown = Countdown("requests")
        for done, total in ((0, 4), (5, 4), (0, 0)):
            countdown.show(done, total, "never")
        assert terminal.getvalue() == ""
        countdown.show(4, 4, "4/4")
        assert terminal.getvalue() == "requests: 4/4, about 0 s left"
