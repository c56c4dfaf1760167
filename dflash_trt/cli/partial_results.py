"""`FILE.partial`: `run` writes every row of FILE there as soon as it is finished; `--resume` reads it.

Line 1 holds the settings that texts depend on; each further line holds one row's result with the row's index and hash.
Rows are in order of completion. When all are there, FILE is written from them, in input order.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.prompts import InputRow, Job, Refusal
from dflash_trt.cli.result_files import (
    WriteLine,
    disk_errors,
    json_line,
    new_jsonl_file,
    output_rows,
    trace_lines,
    write_all,
)
from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.core.request import GenerationOutput

_FORMAT_FIELD = {"format": "dflash-trt partial results 1"}
_FIRST_BYTES = json.dumps(_FORMAT_FIELD)[:-1].encode()
_RECORD_FIELDS = {"row", "sha256", "result"}
_FINISHED = ("stop", "length")  # a row that ended otherwise has no result, and is run again
_MAX_LISTED_ROWS = 3


class PartialResults:
    """An open and locked FILE.partial; see `partial_results`."""

    def __init__(self, path: Path, rows: Sequence[InputRow], settings: Mapping[str, Any], *, resumes: bool) -> None:
        self.path = path
        self._rows = rows
        self._offsets: dict[int, int] = {}  # row index to its latest record
        self._finished: set[int] = set()  # rows that need not run again
        self._failed: set[int] = set()  # in the engine, not refused: they may succeed another time
        self._size = 0  # complete lines only
        self._stream = _open_locked(path, resumes=resumes)
        try:
            self._read(settings)
            if self._size == 0:
                self._append(_FORMAT_FIELD | {"settings": settings})
        except BaseException:
            self._stream.close()
            raise
        self.finished = frozenset(self._finished)  # before this run

    def add(self, index: int, output: GenerationOutput, *, has_trace: bool) -> None:
        """Keep one finished row; index and hash say which."""
        row = self._rows[index]
        result, *others = output_rows(row, output)
        record = {"row": index, "sha256": _sha256(row), "result": result} | ({"samples": others} if others else {})
        if has_trace:
            record["trace"] = list(trace_lines(row.row_id, output))
        start = self._size
        self._append(record)
        self._took(index, start, record)

    def publish(self, output: Path, write_trace: WriteLine | None) -> None:
        """Write the rows in input order, and remove the partial file unless rows failed that could succeed."""
        with new_jsonl_file(output) as write_row, self.path.open("rb") as lines:
            for index, row in enumerate(self._rows):
                if isinstance(row, Refusal):
                    for result in output_rows(row, None):
                        write_row(result)
                    continue
                lines.seek(self._offsets[index])
                record = json.loads(lines.readline())
                for result in _results(record):
                    write_row(result)
                if write_trace is not None:
                    for line in record["trace"]:
                        write_trace(line)
        if self._failed:
            failed = _rows_of(len(self._failed))
            click.echo(f"{self.path}: kept; repeat the command with --resume to retry {failed}", err=True)
        else:
            self.path.unlink()

    def suspend(self) -> None:
        """The run ends early: leave whole lines only, or nothing when there is no result yet."""
        if not self._finished:
            self.path.unlink()
            return
        with suppress(OSError):  # a cut line is dropped by --resume too
            self._stream.truncate(self._size)
        kept = f"{len(self._finished)} of {_rows_of(len(self._rows))} kept"
        click.echo(f"{self.path}: {kept}; repeat the command with --resume to continue", err=True)

    def close(self) -> None:
        self._stream.close()

    # Inside

    def _append(self, fields: Mapping[str, Any]) -> None:
        line = json_line(fields)
        with disk_errors(self.path):
            write_all(self._stream, line)
        self._size += len(line)

    def _took(self, index: int, start: int, record: Mapping[str, Any]) -> None:
        self._offsets[index] = start
        self._failed.discard(index)
        if all(result["finish_reason"] in _FINISHED for result in _results(record)):
            self._finished.add(index)
        elif record["result"]["num_prompt_tokens"] > 0:  # else it was refused, and would be again
            self._failed.add(index)

    def _read(self, settings: Mapping[str, Any]) -> None:
        """Take over what an earlier run left; a last line that was cut is dropped."""
        changed: list[int] = []
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                record = _decoded(line)
                if number == 1:
                    self._check_header(line, record, settings)
                if record is None:
                    if lines.read(1):
                        raise self._not_ours(f"line {number} that is no result")
                    break
                if number > 1 and not self._take_over(record):
                    changed.append(record["row"])
                self._size += len(line)
        self._check_rows(changed)
        self._stream.truncate(self._size)

    def _take_over(self, record: dict[str, Any]) -> bool:
        """False for a row that is another one now."""
        index = record["row"]
        if not (0 <= index < len(self._rows) and _sha256(self._rows[index]) == record["sha256"]):
            return False
        self._took(index, self._size, record)
        return True

    def _check_header(self, line: bytes, record: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
        if line[: len(_FIRST_BYTES)] != _FIRST_BYTES[: len(line)]:
            raise self._not_ours("another file")
        before = settings if record is None else record["settings"]
        problems = [
            problem(
                f"--resume: {name}",
                expected=f"{json.dumps(before.get(name))}, as in the unfinished run",
                found=json.dumps(settings.get(name)),
                hint=f"Pass the same options, or remove {self.path} to start over.",
            )
            for name in before.keys() | settings.keys()
            if before.get(name) != settings.get(name)
        ]
        raise_all(ConfigError, str(self.path), sorted(problems))

    def _check_rows(self, changed: Sequence[int]) -> None:
        if not changed:
            return
        listed = ", ".join(str(index + 1) for index in sorted(changed)[:_MAX_LISTED_ROWS])
        more = "" if len(changed) <= _MAX_LISTED_ROWS else f" and {len(changed) - _MAX_LISTED_ROWS} more"
        hint = f"Restore the input, or remove {self.path} to start over."
        expected, found = "the rows of the unfinished run", f"another input at rows {listed}{more}"
        raise ConfigError.about("--resume", expected=expected, found=found, hint=hint)

    def _not_ours(self, found: str) -> ConfigError:
        hint = "Move it out of the way."
        return ConfigError.about(str(self.path), expected="results of an unfinished run", found=found, hint=hint)


@contextmanager
def partial_results(
    output: Path, trace: Path | None, rows: Sequence[InputRow], settings: Mapping[str, Any], *, resumes: bool
) -> Iterator[PartialResults]:
    """Collect the rows of `output`. `output` and `trace` are written if the block ends without error.

    Otherwise the rows are kept.

    Raises:
        ConfigError: an earlier run left results and `resumes` is false; or they are of other settings or rows.
        CapacityError: the disk is full.
    """
    output = Path(os.path.realpath(output))
    partial = PartialResults(output.with_name(f"{output.name}.partial"), rows, settings, resumes=resumes)
    try:
        with nullcontext(None) if trace is None else new_jsonl_file(trace) as write_trace:
            yield partial
            partial.publish(output, write_trace)
    except BaseException:
        partial.suspend()
        raise
    finally:
        partial.close()


def _open_locked(path: Path, *, resumes: bool) -> FileIO:
    finished = path.with_suffix("")
    if resumes and not path.exists() and finished.exists():
        hint = "Leave --resume out to run all rows again."
        raise ConfigError.about("--resume", expected=str(path), found=f"a finished {finished} only", hint=hint)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (0 if resumes else os.O_EXCL)
    try:
        stream = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
    except FileExistsError:
        hint = "Pass --resume to run the other rows, or remove the file to start over."
        raise ConfigError.about(str(path), expected="no such file", found="an unfinished run's", hint=hint) from None
    except OSError as error:
        expected, hint = "a file to write", "Check the path and its permissions."
        found = str(error.strerror)
        raise ConfigError.about(str(finished), expected=expected, found=found, hint=hint) from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        hint = "Wait for it to end, or choose another --output-file."
        raise ConfigError.about(str(path), expected="one run at a time", found="another one", hint=hint) from None
    except OSError:
        pass  # a file system without locks
    return stream


def _results(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of all samples of a row."""
    return [record["result"], *record.get("samples", ())]


def _decoded(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not whole."""
    try:
        fields = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    is_known = isinstance(fields, dict) and ("settings" in fields or fields.keys() >= _RECORD_FIELDS)
    return fields if is_known else None


def _sha256(row: InputRow) -> str:
    """Hash of everything that a row's text depends on; equal for equal rows of one version of dflash-trt."""
    fields = asdict(row) if isinstance(row, Job) else {"error": row.error}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _rows_of(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"
