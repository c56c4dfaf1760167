"""A line on the terminal while a command waits, wiped afterwards. `rich` would make it wait for its own import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from shutil import get_terminal_size

import click


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Show `text` on stderr for the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    shown = text[: get_terminal_size().columns - 1]  # a wrapped line could not be wiped
    click.echo(shown, nl=False, err=True)
    try:
        yield
    finally:
        click.echo(f"\r{' ' * len(shown)}\r", nl=False, err=True)
