"""Result files: written whole or not at all, rows in input order, one trace line per step."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.prompts import InputRow, Job, Refusal, RowId
from dflash_trt.core.errors import CapacityError, ConfigError
from dflash_trt.core.request import GenerationOutput, SamplingParams, TokenEvent, verified_drafts

if TYPE_CHECKING:  # needs numpy
    from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob

WriteLine = Callable[[Mapping[str, Any]], None]


@contextmanager
def new_jsonl_file(path: Path) -> Iterator[WriteLine]:
    """Write JSON lines to a temporary sibling that takes the place of `path` when the block ends well.

    A pipe or a device is written directly.

    Raises:
        ConfigError: the file cannot be made.
        CapacityError: it cannot be written to its end.
    """
    path = Path(os.path.realpath(path))
    is_replaced = path.is_file() or not path.exists()
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}") if is_replaced else path
    try:
        stream = temporary.open("wb", buffering=0)
    except OSError as error:
        found = str(error.strerror)
        hint = "Check the path and its permissions."
        raise ConfigError.about(str(path), expected="a file to write", found=found, hint=hint) from error

    def write_line(fields: Mapping[str, Any]) -> None:
        with disk_errors(path):
            write_all(stream, json_line(fields))

    try:
        with stream:
            yield write_line
            with disk_errors(path):
                if is_replaced:
                    os.fsync(stream.fileno())
        if is_replaced:
            temporary.replace(path)
    except BaseException:
        if is_replaced:
            temporary.unlink(missing_ok=True)
        raise


class InOrder:
    """Calls `emit` once per index 0, 1, 2, ..., in order, each as soon as all earlier ones are done."""

    def __init__(self, emit: Callable[[int, GenerationOutput | None], None]) -> None:
        self._emit = emit
        self._waiting: dict[int, GenerationOutput | None] = {}
        self._next_index = 0

    def done(self, index: int, output: GenerationOutput | None) -> None:
        self._waiting[index] = output
        while self._next_index in self._waiting:
            self._emit(self._next_index, self._waiting.pop(self._next_index))
            self._next_index += 1


def output_rows(row: InputRow, output: GenerationOutput | None) -> list[dict[str, Any]]:
    """The results of one row as they stand in an output file, one for each sample.

    `output` is None for a refused row only.
    """
    if isinstance(row, Refusal):
        return [_failed_row(row.row_id, row.error)]
    assert output is not None
    return [_sample_row(row, sample) for sample in output.samples]


def _sample_row(row: Job, output: GenerationOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": row.row_id,
        **({} if row.category is None else {"category": row.category}),
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_output_tokens": len(output.token_ids),
        "acceptance_length": output.acceptance_length,
        "num_verify_steps": output.num_verify_steps,
        "num_draft_tokens": output.num_draft_tokens,
        "num_accepted_tokens": output.num_accepted_tokens,
        "time_to_first_token_s": round(output.time_to_first_token_s, 6),
        "total_s": round(output.total_s, 6),
    }
    return fields | _optional_fields(row.sampling, output)


def trace_lines(row_id: RowId, output: GenerationOutput) -> Iterator[dict[str, Any]]:
    """One line per step. `num_accepted` is the step's, before a stop cut its tokens."""
    for sample in output.samples:
        index = {"sample_index": sample.sample_index} if output.other_samples else {}
        yield from (line | index for line in _lines_of_sample(row_id, sample))


def _lines_of_sample(row_id: RowId, output: GenerationOutput) -> Iterator[dict[str, Any]]:
    before = TokenEvent("", ())
    for number, step in enumerate(output.steps):
        line: dict[str, Any] = {
            "id": row_id,
            "step": number,  # of this request
            "context_len": step.context_len,
            "num_candidates": step.num_candidates,
            "num_accepted": step.num_accepted,
            "token_ids": list(step.token_ids),
        }
        drafts = verified_drafts(before, step)
        yield line | ({"draft_token_ids": list(drafts)} if len(drafts) == step.num_candidates else {})
        before = step


def json_line(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode()


def write_all(stream: FileIO, line: bytes) -> None:
    """A raw write may take a part only."""
    left = memoryview(line)
    while left:
        left = left[stream.write(left) :]


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises CapacityError for what the disk refuses."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "Free some space or choose another path."
        raise CapacityError.about(
            str(path), expected="a disk that takes the results", found=str(error.strerror), hint=hint
        ) from error


def _optional_fields(sampling: SamplingParams, output: GenerationOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if sampling.logprobs:
        fields["logprobs"] = list(output.logprobs)
    if sampling.top_logprobs:
        fields["top_logprobs"] = [_json_entries(entries) for entries in output.top_logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [_json_prompt_entry(entry) for entry in output.prompt_logprobs]
    if sampling.n > 1:
        fields["sample_index"] = output.sample_index
    if output.error is not None:
        fields["error"] = output.error
    return fields


def _json_entries(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [entry._asdict() for entry in entries]


def _json_prompt_entry(entry: PromptLogprob | None) -> dict[str, Any] | None:
    """None for the first token."""
    return None if entry is None else entry._asdict() | {"top_logprobs": _json_entries(entry.top_logprobs)}


def _failed_row(row_id: RowId, error: str) -> dict[str, Any]:
    return {
        "id": row_id,
        "text": None,
        "token_ids": [],
        "finish_reason": "error",
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "acceptance_length": None,
        "error": error,
    }
