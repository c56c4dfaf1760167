"""Inputs of `dflash-trt run`: prompts of the command line, of stdin, or the rows of a JSONL file.

A wrong row becomes a Refusal, without effect on other rows. The engine refuses prompts that are too long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.cli.sampling_options import SAMPLING_NAMES, override
from dflash_trt.core.errors import ConfigError, RequestError, problem, raise_all
from dflash_trt.core.other_engines import hint_for
from dflash_trt.core.request import SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
KWARGS_FIELD = "chat_template_kwargs"
_KNOWN_FIELDS = ("id", *PROMPT_FIELDS, KWARGS_FIELD, "category", *SAMPLING_NAMES)

MAX_LISTED_ROWS = 5  # in an error

RowId = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`prompt` is what LLM.generate takes: text, or one of PROMPT_FIELDS with its value.

    Measurements count each `category` apart; it asks for nothing.
    """

    row_id: RowId
    prompt: str | Mapping[str, Any]
    sampling: SamplingParams
    category: str | None = None

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompt, Mapping) and "messages" in self.prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A row that never reaches the engine, and why."""

    row_id: RowId
    error: str


InputRow = Job | Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Defaults of all rows. `wraps_in_chat` makes text the user message of a conversation.

    `chat_template_kwargs` go to the template of every conversation; a row's own are added, and win.
    """

    sampling: SamplingParams
    wraps_in_chat: bool = False
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def rows_of_texts(texts: Iterable[str], defaults: Defaults) -> list[InputRow]:
    """One row per text, with ids 1, 2, ..."""
    return [_row(number, {"prompt": text}, defaults) for number, text in enumerate(texts, start=1)]


def rows_of_jsonl(lines: Iterable[bytes], defaults: Defaults) -> Iterator[InputRow]:
    """One row per line that is not blank; without an `id` of its own a row has its line number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield _refusal(
                number, "UTF-8 text", f"byte {error.object[error.start]:#04x} at {error.start}", "Save it as UTF-8."
            )
        except (ValueError, RecursionError) as error:
            yield _refusal(number, "a JSON object", str(error), "Write one object per line.")
        else:
            yield _row(number, fields, defaults)


def read_jobs(path: Path, defaults: Defaults, *, num_rows: int | None = None) -> list[Job]:
    """The first rows of a JSONL file, by default all, for a measurement, which must not skip wrong rows.

    Raises:
        ConfigError: a row is wrong, or there is none.
    """
    try:
        with path.open("rb") as stream:
            rows = list(rows_of_jsonl(stream, defaults))[:num_rows]
    except OSError as error:
        found = str(error.strerror)
        raise ConfigError.about(str(path), expected="a JSONL file", found=found, hint="Check the path.") from error
    refused = [f"{row.row_id}: {row.error}" for row in rows if isinstance(row, Refusal)]
    raise_all(ConfigError, str(path), refused[:MAX_LISTED_ROWS])
    jobs = [row for row in rows if isinstance(row, Job)]
    if not jobs:
        hint = 'Write one JSON object per line, for example {"prompt": "Hello"}.'
        raise ConfigError.about(str(path), expected="at least one prompt", found="none", hint=hint)
    return jobs


def _row(number: int, fields: Any, defaults: Defaults) -> InputRow:
    """Check one decoded row."""
    if not isinstance(fields, dict):
        return _refusal(number, "a JSON object", f"a JSON {type(fields).__name__}", "Write one object per line.")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return _refusal(number, "valid Unicode text", str(error), "Pass text that UTF-8 can encode.")
    row_id = fields.get("id", number)
    if not isinstance(row_id, str | int) or isinstance(row_id, bool):
        return _refusal(number, "an id that is a string or an integer", repr(row_id), "Change or remove the id.")
    try:
        raise_all(RequestError, "input row", list(_problems(fields)))
        prompt = _prompt(fields, defaults)
        given = {name: fields[name] for name in SAMPLING_NAMES if name in fields}
        sampling = override(defaults.sampling, given)
    except RequestError as error:
        return Refusal(row_id=row_id, error=str(error))
    return Job(row_id=row_id, prompt=prompt, sampling=sampling, category=fields.get("category"))


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    for name in fields.keys() - set(_KNOWN_FIELDS):
        hint = hint_for(name, _KNOWN_FIELDS)
        yield f"field '{name}' is unknown. {hint}"
    category = fields.get("category")
    if category is not None and not isinstance(category, str):
        yield problem("category", expected="text", found=repr(category))
    prompts = [name for name in PROMPT_FIELDS if name in fields]
    if len(prompts) != 1:
        expected = f"exactly one of {', '.join(PROMPT_FIELDS)}"
        yield problem("prompt", expected=expected, found=" and ".join(prompts) or "none", hint="Keep one of them.")


def _prompt(fields: Mapping[str, Any], defaults: Defaults) -> str | Mapping[str, Any]:
    """The prompt as the engine takes it, wrapped as the command line says. Raises RequestError."""
    name = next(name for name in PROMPT_FIELDS if name in fields)
    value = fields[name]
    if name == "prompt" and defaults.wraps_in_chat and isinstance(value, str) and value:
        name, value = "messages", [*_system(defaults), {"role": "user", "content": value}]
    elif name == "messages" and isinstance(value, list) and not _has_system(value):
        value = [*_system(defaults), *value]
    own = _template_kwargs(fields, is_conversation=name == "messages")
    kwargs = {**defaults.chat_template_kwargs, **own} if name == "messages" else {}
    return {name: value, KWARGS_FIELD: kwargs} if kwargs else {name: value}


def _template_kwargs(fields: Mapping[str, Any], *, is_conversation: bool) -> Mapping[str, Any]:
    """Those of the row. Raises RequestError."""
    if KWARGS_FIELD not in fields:
        return {}
    from dflash_trt.serving.prompts import check_template_kwargs

    kwargs: Mapping[str, Any] = fields[KWARGS_FIELD]
    check_template_kwargs(kwargs)
    if not is_conversation:
        hint = "Leave it out, pass messages, or add --chat."
        raise RequestError.about(KWARGS_FIELD, expected="only in a conversation", found="another prompt", hint=hint)
    return kwargs


def _system(defaults: Defaults) -> list[dict[str, str]]:
    return [] if defaults.system is None else [{"role": "system", "content": defaults.system}]


def _has_system(messages: list[Any]) -> bool:
    return any(isinstance(message, dict) and message.get("role") == "system" for message in messages)


def _refusal(number: int, expected: str, found: str, hint: str) -> Refusal:
    return Refusal(row_id=number, error=problem("input row", expected=expected, found=found, hint=hint))
