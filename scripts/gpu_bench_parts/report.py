"""Rows of results, as JSON and as Markdown tables. Knows no measurement."""

import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


@dataclass(kw_only=True)
class Report:
    """`tables` are lists of rows; `left_out` says what was not measured and why, `failures` what broke."""

    directory: Path
    command: list[str]
    machine: Row = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add_machine(self, roofs: Any, **versions: str) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.machine = {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "num_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **versions,
            **asdict(roofs),
        }

    def add(self, table: str, row: Row) -> None:
        self.tables.setdefault(table, []).append(row)
        print(f"{table}: " + ", ".join(f"{key} {_cell(value)}" for key, value in row.items()), flush=True)

    def leave_out(self, what: str) -> None:
        self.left_out.append(what)
        print(f"left out: {what}", flush=True)

    def fail(self, what: str, error: Exception) -> None:
        """One measurement broke; the others go on, and the command ends with exit code 1."""
        self.failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
        print(f"FAILED {self.failures[-1]}", flush=True)

    def write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {
            "command": shlex.join(self.command),
            "machine": self.machine,
            "tables": self.tables,
            "left_out": self.left_out,
            "failures": self.failures,
        }
        (self.directory / "results.json").write_text(json.dumps(content, indent=2) + "\n")
        (self.directory / "results.md").write_text(self._markdown())

    def _markdown(self) -> str:
        lines = ["# GPU measurements", "", f"`{shlex.join(self.command)}`", ""]
        lines += [f"- {key}: {_cell(value)}" for key, value in self.machine.items()]
        for name, rows in self.tables.items():
            keys = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", f"## {name}", "", f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            lines += [f"| {' | '.join(_cell(row.get(key, '')) for key in keys)} |" for row in rows]
        if self.left_out:
            lines += ["", "## Not measured", "", *(f"- {what}" for what in self.left_out)]
        if self.failures:
            lines += ["", "## Failed", "", *(f"- {what}" for what in self.failures)]
        return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
