"""Lines on stderr while a command works: how far it is, and the time left. Importing `rich` would add to the wait."""

import time

import click


class TimeLeft:
    """Prints a numbered line for each step that ends; all steps are expected to take about as long."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, number: int, num_steps: int, text: str) -> None:
        left_s = (time.monotonic() - self._started_s) / number * (num_steps - number)
        left = f", about {duration(left_s)} left" if number < num_steps else ""
        click.echo(f"[{number}/{num_steps}] {text}{left}", err=True)


def duration(seconds: float) -> str:
    """In the largest units, such as 45 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
