"""A terminal line while a command waits, wiped afterwards. Importing `rich` would add to the wait.

Logs of the package meanwhile, such as the compilation of its CPU kernels, get lines of their own.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size

import click

_MIN_S_BETWEEN_UPDATES = 0.1


class StatusLine:
    """Shows one line of text on stderr, if stderr is a terminal. One thread at a time."""

    def __init__(self) -> None:
        self.is_shown = sys.stderr.isatty()
        self._num_columns = 0  # length of the text shown
        self._updated_s = 0.0

    def show(self, text: str) -> None:
        """Replace the text."""
        if not self.is_shown:
            return
        text = text[: get_terminal_size().columns - 1]  # a wrapped line could not be wiped
        start = "\r" if self._num_columns else ""
        click.echo(f"{start}{text}{' ' * (self._num_columns - len(text))}", nl=False, err=True)
        self._num_columns, self._updated_s = len(text), time.monotonic()

    def show_read(self, num_read: int, num_bytes: int) -> None:
        """Bytes of weights read, of all; at most ten times a second."""
        if num_read in (0, num_bytes) or time.monotonic() - self._updated_s > _MIN_S_BETWEEN_UPDATES:
            unit, name = (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")
            self.show(f"reading weights: {num_read / unit:.1f} of {num_bytes / unit:.1f} {name}")

    def wipe(self) -> None:
        """Remove it."""
        if self._num_columns:
            click.echo(f"\r{' ' * self._num_columns}\r", nl=False, err=True)
        self._num_columns = 0


@contextmanager
def status_line(text: str) -> Iterator[StatusLine]:
    """Show `text` for the block."""
    line = StatusLine()
    line.show(text)
    try:
        yield line
    finally:
        line.wipe()


class _Notices(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr.isatty():  # a status line may stand there
            click.echo(f"\r{' ' * (get_terminal_size().columns - 1)}\r", nl=False, err=True)
        click.echo(self.format(record), err=True)


@contextmanager
def notices_shown() -> Iterator[None]:
    """Show what the package logs, from INFO on, for the block."""
    log, notices = logging.getLogger("dflash_trt"), _Notices(logging.INFO)
    level = log.level
    log.addHandler(notices)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(notices)
        log.setLevel(level)
