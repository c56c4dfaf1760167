"""How far a command is, and the time left, on stderr. Importing `rich` would add to the wait."""

import time

import click

from dflash_trt.cli.status_line import StatusLine

_S_BETWEEN_LINES = 10.0


class TimeLeft:
    """Prints a numbered line for each step that ends; all steps are expected to take about as long."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, number: int, num_steps: int, text: str) -> None:
        left = "" if number == num_steps else f", {_left(self._started_s, number, num_steps)}"
        click.echo(f"[{number}/{num_steps}] {text}{left}", err=True)


class Countdown:
    """A long stage: a status line on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._line = StatusLine()
        self._started_s = self._printed_s = time.monotonic()

    def show(self, done: float, total: float, counts: str) -> None:
        """`counts` is `done` of `total` in words."""
        if not 0 < done <= total:
            return
        text = f"{self._stage}: {counts}, {_left(self._started_s, done, total)}"
        if self._line.is_shown:
            self._line.show(text)
        elif time.monotonic() - self._printed_s >= _S_BETWEEN_LINES:
            self._printed_s = time.monotonic()
            click.echo(text, err=True)

    def wipe(self) -> None:
        """Remove the status line."""
        self._line.wipe()


class StageLines:
    """Stages of a command whose stderr is no terminal: a line for each, and more while it is long."""

    def __init__(self) -> None:
        self._countdowns: dict[str, Countdown] = {}

    def show(self, stage: str, done: float, total: float, counts: str) -> None:
        if stage not in self._countdowns:
            self._countdowns[stage] = Countdown(stage)
            click.echo(f"{stage} ...", err=True)
        self._countdowns[stage].show(done, total, counts)


def _left(started_s: float, done: float, total: float) -> str:
    return f"about {duration((time.monotonic() - started_s) / done * (total - done))} left"


def duration(seconds: float) -> str:
    """In the largest units, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
