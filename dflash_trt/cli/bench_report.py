"""The report of every bench: a text for people, JSON, a CSV row for each measurement, a figure; and gates for CI."""

import csv
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.help_text import PATH, OptionSet
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from dflash_trt.bench.comparison import Gate

JSON = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
CSV = click.option("--csv", "csv_path", type=PATH, metavar="PATH", help="A table to write.")
FIGURE = click.option("--figure", type=PATH, metavar="PATH", help="A figure to write: .png or .svg.")


REPORT = OptionSet(CSV, FIGURE, JSON)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """`rows` are the measurements as JSON has them, `facts` what they depend on, `lines` the text for people.

    `draw` writes the figure, with the facts as its caption.
    """

    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[str]
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    draw: Callable[[Path, tuple[str, ...]], None] | None = None

    def publish(self, options: Mapping[str, Any]) -> None:
        """Print it, and write the files, as the options of REPORT say."""
        csv_path, figure = options["csv_path"], options.get("figure")
        facts = {"command": typed_command(), "hardware": this_machine(), **self.facts}
        if csv_path is not None:
            _write_table(csv_path, self.rows)
        if figure is not None:
            assert self.draw is not None
            self.draw(figure, tuple(f"{name.capitalize()}: {facts[name]}" for name in _CAPTION if name in facts))
        if options["as_json"]:
            click.echo(json.dumps({**facts, "warnings": list(self.warnings), "reports": list(self.rows)}, indent=2))
            return
        for line in self.lines:
            click.echo(line)
        for name in _CAPTION:
            if name in facts:
                click.echo(f"{name}: {facts[name]}")
        for warning in self.warnings:
            click.secho(f"warning: {warning}", fg="yellow", err=True)


_CAPTION = ("hardware", "workload", "command")  # facts for people; the longest is the last


def gate_rows(gates: "Sequence[Gate]") -> list[dict[str, Any]]:
    """As JSON."""
    return [{name: getattr(gate, name) for name in ("name", "bound", "value", "has_passed")} for gate in gates]


def gate_lines(gates: "Sequence[Gate]") -> Iterator[str]:
    """A line for each, in red if it is missed."""
    for gate in gates:
        bound = f"{'at most' if gate.is_upper else 'at least'} {gate.bound:g}"
        value = "none" if gate.value is None else f"{gate.value:.4g}"
        line = f"gate {gate.name} ({bound}): {value} {'passed' if gate.has_passed else 'FAILED'}"
        yield line if gate.has_passed else click.style(line, fg="red")


def exit_code(gates: "Sequence[Gate]") -> ExitCode:
    return ExitCode.DONE if all(gate.has_passed for gate in gates) else ExitCode.REQUEST_FAILED


def check_paths(options: Mapping[str, Any]) -> None:
    """Check the files of REPORT, before minutes of measurement, against the other paths of all options.

    Raises:
        ConfigError: a file cannot be written, or the command reads or writes it as another one, too.
    """
    figure, seen = options.get("figure"), dict[Path, str]()
    for name, path in sorted(options.items(), key=lambda option: option[0] in ("csv_path", "figure")):
        if not isinstance(path, Path):
            continue
        is_written, flag = name in ("csv_path", "figure"), f"--{name.removesuffix('_path').replace('_', '-')}"
        if is_written and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise ConfigError.about(str(path), expected="a file in a directory that exists", found="none")
        other = seen.setdefault(path.resolve(), flag)
        if is_written and other != flag and (path.is_file() or not path.exists()):
            raise ConfigError(f"{other} and {flag} name the same file.")
    if figure is not None:
        from dflash_trt.bench.figure_file import check_figure

        check_figure(figure)


def this_machine() -> str:
    """Its GPUs, or its processor."""
    from dflash_trt.doctor.machine import gpus, machine

    names = [gpu["name"] for gpu in gpus()]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    host = machine()
    return f"{host['processor']}, {host['num_cores']} cores, no GPU"


def typed_command() -> str:
    """The command line as it was typed."""
    return shlex.join(click.get_current_context().find_root().obj or ["dflash-trt"])


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows have the columns of each; what a row lacks is empty."""
    flat = [dict(_cells(row)) for row in rows]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(name for row in flat for name in row)))
        writer.writeheader()
        writer.writerows(flat)


def _cells(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Values by column: a field of a field is FIELD_FIELD, and the first of a list FIELD_1."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
    for key, part in parts:
        column = f"{name}_{key}" if name else str(key)
        if isinstance(part, Mapping | list | tuple):
            yield from _cells(part, column)
        elif part is not None:
            yield column, part
