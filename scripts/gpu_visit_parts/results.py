"""Results of a visit: one JSON line per case, appended when it starts and when it ends, and the tables made of them.

Knows no measurement, and needs nothing but Python.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]
DONE = ("ok", "failed", "left out")


class Results:
    """`results.jsonl` and `results.md` in a directory. The last line of a case counts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._path = directory / "results.jsonl"

    def cases(self, part: int | None = None) -> dict[tuple[int, str], Row]:
        """The last line of each case, in the order in which they started."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        last: dict[tuple[int, str], Row] = {}
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # cut off while it was written
                continue
            last[row["part"], row["case"]] = row
        return {key: row for key, row in last.items() if part in (None, key[0])}

    def done(self, part: int) -> set[str]:
        return {case for (_, case), row in self.cases(part).items() if row["status"] in DONE}

    def running(self, part: int) -> Row | None:
        return next((row for row in self.cases(part).values() if row["status"] == "running"), None)

    def forget(self, part: int, statuses: tuple[str, ...] | None = None) -> None:
        """Drop the cases of a part, or those with these statuses."""
        kept = [
            row
            for (of_part, _), row in self.cases().items()
            if of_part != part or (statuses is not None and row["status"] not in statuses)
        ]
        self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))

    def start(self, part: int, case: str) -> None:
        self._add({"part": part, "case": case, "status": "running", "at": time.time()})

    def end(self, part: int, case: str, status: str, *, tables: Tables | None = None, why: str = "") -> None:
        """`why` is a traceback or a reason."""
        row: Row = {"part": part, "case": case, "status": status, "at": time.time()}
        row |= ({"tables": tables} if tables else {}) | ({"why": why} if why else {})
        self._add(row)
        print(
            f"part {part}: {status}: {case}" + (f": {why.strip().splitlines()[-1]}" if why.strip() else ""), flush=True
        )

    def share(self, index: int) -> "Results":
        """Of one of several jobs, with what has a result here already."""
        own = Results(Path(tempfile.mkdtemp(prefix=f"gpu-visit-share-{index}-")))
        own._path.write_text(self._path.read_text() if self._path.exists() else "")
        return own

    def add_all(self, share: "Results") -> None:
        """What a share has beyond what it began with."""
        known = self.cases()
        for key, row in share.cases().items():
            if known.get(key) != row:
                self._add(row)

    def write_tables(self) -> None:
        tables: Tables = {}
        problems: dict[str, list[str]] = {}
        counts: dict[int, dict[str, int]] = {}
        for (part, case), row in self.cases().items():
            counts.setdefault(part, {}).setdefault(row["status"], 0)
            counts[part][row["status"]] += 1
            for name, rows in row.get("tables", {}).items():
                tables.setdefault(f"{part}. {name}", []).extend(rows)
            if row["status"] != "ok":
                problems.setdefault(row["status"], []).append(f"{part}, {case}: {row.get('why', '')}")
        lines = ["# Visit to a GPU", ""]
        lines += [f"- part {part}: {', '.join(f'{n} {s}' for s, n in c.items())}" for part, c in sorted(counts.items())]
        for name, rows in tables.items():
            keys = list(dict.fromkeys(key for row in rows for key in row))
            lines += ["", f"## {name}", "", f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            lines += [f"| {' | '.join(_cell(row.get(key, '')) for key in keys)} |" for row in rows]
        for status, whys in problems.items():
            lines += ["", f"## {status.capitalize()}", "", *(f"```\n{why.rstrip()}\n```" for why in whys)]
        (self.directory / "results.md").write_text("\n".join(lines) + "\n")

    def _add(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
