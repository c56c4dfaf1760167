"""Conversations of a load test, from rows as in `dflash-trt run`, SPEED-Bench or a data set.

SPEED-Bench (nvidia/SPEED-Bench, prepared with specdec_bench or NeMo-Skills) has `question_id`, `category`, and
`messages` or `turns`: the user's text turn by turn. We may not ship its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.data_sets import is_data_set, rows_of_data_set
from dflash_trt.cli.prompts import KWARGS_FIELD, MAX_LISTED_ROWS, Defaults, Job, Refusal, rows_of_jsonl
from dflash_trt.core.errors import ConfigError, RequestError, problem, raise_all
from dflash_trt.core.request import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.bench.conversation import Conversation

# Fields of SPEED-Bench that say where a row is from.
_OF_SOURCE = ("sub_category", "source", "src_id", "difficulty", "multiturn")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


def read_conversations(
    path: Path, *, categories: Sequence[str] = (), columns: Mapping[str, str] | None = None, split: str | None = None
) -> list[Conversation]:
    """Rows of a JSONL file or data set, optionally of some categories only.

    Their sampling fields are ignored. Categories alternate, so that a load that takes few rows has a share of each.
    `columns` are columns by field: only these are read then. `split` is a split of a data set.

    Raises:
        ConfigError: rows are wrong, there is none, or none of a category.
    """
    conversations, refused = [], []
    for number, line in enumerate(_lines(path, columns or {}, split), start=1):
        if line.strip():
            try:
                conversations.append(_conversation(line))
            except RequestError as error:
                refused.append(f"line {number}: {error}")
    raise_all(ConfigError, str(path), refused[:MAX_LISTED_ROWS])
    known = {conversation.category for conversation in conversations}
    for name in categories:
        if name not in known:
            found = ", ".join(sorted(filter(None, known))) or "none"
            raise ConfigError.about(f"--category {name}", expected=f"a category of {path}", found=found)
    chosen = [one for one in conversations if not categories or one.category in categories]
    if not chosen:
        hint = 'Write one JSON object per line, for example {"prompt": "Hello"}.'
        raise ConfigError.about(str(path), expected="at least one prompt", found="none", hint=hint)
    return _interleaved(chosen)


def _lines(path: Path, columns: Mapping[str, str], split: str | None) -> Iterator[bytes]:
    """Rows as JSON. Raises ConfigError."""
    if is_data_set(path):
        for number, row in enumerate(rows_of_data_set(path, columns=columns, split=split), start=1):
            yield _json_of(_by_turns(row, number), f"{path}, row {number}")
        return
    if split is not None:
        raise ConfigError.about("--split", expected="a directory of a data set", found=str(path))
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        found = str(error.strerror)
        hint = "Check the path."
        raise ConfigError.about(str(path), expected="a JSONL file or a data set", found=found, hint=hint) from error
    known: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        yield _renamed(line, columns, number, known) if columns and line.strip() else line
    missing = [column for column in columns.values() if column not in known]
    if missing and known:
        expected, found = f"a column {', '.join(missing)}", ", ".join(known)
        hint = "Name it, for example --column prompt=text."
        raise ConfigError.about(str(path), expected=expected, found=found, hint=hint)


def _renamed(line: bytes, columns: Mapping[str, str], number: int, known: dict[str, None]) -> bytes:
    """The row with these columns only.

    A row that is no JSON object is returned unchanged, to be refused later. `known` gains the row's columns.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if not isinstance(fields, dict):
        return line
    known |= dict.fromkeys(fields)
    chosen = {name: fields[column] for name, column in columns.items() if fields.get(column) is not None}
    return json.dumps(_by_turns(chosen, number)).encode()


def _by_turns(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Turns make a row one of SPEED-Bench's layout; a text is one turn."""
    if isinstance(fields.get("turns"), str):
        fields["turns"] = [fields["turns"]]
    return {"question_id": number, **fields} if "turns" in fields else fields


def _json_of(fields: Mapping[str, Any], subject: str) -> bytes:
    """Raises ConfigError for values that JSON does not have, such as bytes and dates."""
    try:
        return json.dumps(fields).encode()
    except TypeError as error:
        hint = "Read other columns with --column."
        raise ConfigError.about(subject, expected="text, numbers, lists", found=str(error), hint=hint) from error


def _interleaved(conversations: Sequence[Conversation]) -> list[Conversation]:
    by_category: dict[str | None, list[Conversation]] = {}
    for one in conversations:
        by_category.setdefault(one.category, []).append(one)
    return [one for row in zip_longest(*by_category.values()) for one in row if one is not None]


def _conversation(line: bytes) -> Conversation:
    """Raises RequestError."""
    from dflash_trt.bench.conversation import Conversation

    is_by_turns, row = _as_row(line)
    (job,) = rows_of_jsonl([row], Defaults(sampling=SamplingParams()))
    if isinstance(job, Refusal):
        raise RequestError(job.error)
    prompt = _fields(job)
    if "messages" not in prompt:
        return Conversation(category=job.category, prompt=prompt.get("prompt", prompt.get("prompt_token_ids")))
    messages = prompt["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError.about("messages", expected="a list of objects", found=repr(messages)[:80])
    kwargs = {KWARGS_FIELD: prompt[KWARGS_FIELD]} if KWARGS_FIELD in prompt else {}
    turns = _turns(messages) if is_by_turns else (tuple(messages),)
    return Conversation(category=job.category, turns=turns, fields=kwargs)


def _fields(job: Job) -> Mapping[str, Any]:
    return job.prompt if isinstance(job.prompt, Mapping) else {"prompt": job.prompt}


def _as_row(line: bytes) -> tuple[bool, bytes]:
    """Whether the messages are turns of a user, and a row of `run`."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return False, line  # which the reader of rows refuses, with its reason
    if not isinstance(fields, dict):
        return False, line
    is_speed_bench = "question_id" in fields
    if is_speed_bench:
        fields["id"] = fields.pop("question_id")
        fields = {name: value for name, value in fields.items() if name not in _OF_SOURCE}
        if "turns" in fields:
            fields["messages"] = _messages(fields.pop("turns"))
        if _PLACEHOLDER in line.decode(errors="replace"):
            hint = "Prepare the data with specdec_bench's prepare_data.py."
            raise RequestError.about("SPEED-Bench", expected="filled prompts", found="placeholders", hint=hint)
    return is_speed_bench, json.dumps(fields).encode()


def _messages(turns: Any) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise RequestError(problem("turns", expected="a list of texts", found=repr(turns)[:80]))
    return [{"role": "user", "content": turn} for turn in turns]


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[Mapping[str, Any], ...], ...]:
    """A turn ends with what the user says. Messages that have answers already are one conversation."""
    roles = [message.get("role") for message in messages]
    if "assistant" in roles or "user" not in roles:
        return (tuple(messages),)
    ends = [index + 1 for index, role in enumerate(roles) if role == "user"]
    starts = [0, *ends[:-1]]
    return tuple(tuple(messages[start:end]) for start, end in zip(starts, ends, strict=True))
