"""Rows of prompts, as `run`, `eval` and every bench read them; and texts as rows.

A wrong row becomes a Refusal, without effect on other rows. The engine refuses prompts that are too long.

A row with a `question_id` has the layout of SPEED-Bench (nvidia/SPEED-Bench, prepared with specdec_bench or
NeMo-Skills): `messages` or `turns` are the user's text turn by turn. We may not ship its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.cli.sampling_options import SAMPLING_NAMES, override
from dflash_trt.core.errors import RequestError, problem, raise_all
from dflash_trt.core.other_engines import hint_for
from dflash_trt.core.request import SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids", "turns")
KWARGS_FIELD = "chat_template_kwargs"
_KNOWN_FIELDS = ("id", *PROMPT_FIELDS, KWARGS_FIELD, "category", *SAMPLING_NAMES)

# Fields of SPEED-Bench that say where a row is from.
_OF_SOURCE = ("sub_category", "source", "src_id", "difficulty", "multiturn")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"

MAX_LISTED_ROWS = 5  # in an error

RowId = str | int
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """`prompt` is what LLM.generate takes: text, or a prompt's field with its value.

    `later_turns` are messages to send after the answer to those before. Measurements count each `category` apart.
    """

    row_id: RowId
    prompt: str | Mapping[str, Any]
    sampling: SamplingParams
    category: str | None = None
    later_turns: tuple[Messages, ...] = ()

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
    return [row_of(number, {"prompt": text}, defaults) for number, text in enumerate(texts, start=1)]


def decoded_row(number: int, line: bytes) -> Any:
    """The fields of a line of JSON, or a Refusal."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start}"
        return _refusal(number, "UTF-8 text", found, "Save it as UTF-8.")
    except (ValueError, RecursionError) as error:
        return _refusal(number, "a JSON object", str(error), "Write one object per line.")


def row_of(number: int, fields: Any, defaults: Defaults) -> InputRow:
    """Check one decoded row; without an `id` of its own it has its number."""
    if isinstance(fields, Refusal):
        return fields
    if not isinstance(fields, dict):
        return _refusal(number, "a JSON object", f"a JSON {type(fields).__name__}", "Write one object per line.")
    try:
        text = json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return _refusal(number, "valid Unicode text", str(error), "Pass text that UTF-8 can encode.")
    is_by_turns = "turns" in fields or "question_id" in fields
    if "question_id" in fields:
        fields = {"id": fields["question_id"]} | {
            name: value for name, value in fields.items() if name not in ("question_id", *_OF_SOURCE)
        }
        if _PLACEHOLDER.encode() in text:
            hint = "Prepare the data with specdec_bench's prepare_data.py."
            return _refusal(number, "filled prompts", "placeholders of SPEED-Bench", hint)
    row_id = fields.get("id", number)
    if not isinstance(row_id, str | int) or isinstance(row_id, bool):
        return _refusal(number, "an id that is a string or an integer", repr(row_id), "Change or remove the id.")
    try:
        raise_all(RequestError, "input row", list(_problems(fields)))
        prompt, later_turns = _prompt(fields, defaults, is_by_turns=is_by_turns)
        given = {name: fields[name] for name in SAMPLING_NAMES if name in fields}
        sampling = override(defaults.sampling, given)
    except RequestError as error:
        return Refusal(row_id=row_id, error=str(error))
    category = fields.get("category")
    return Job(row_id=row_id, prompt=prompt, sampling=sampling, category=category, later_turns=later_turns)


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


def _prompt(
    fields: Mapping[str, Any], defaults: Defaults, *, is_by_turns: bool
) -> tuple[Mapping[str, Any], tuple[Messages, ...]]:
    """The prompt as the engine takes it, wrapped as the command line says, and its later turns. Raises RequestError."""
    name = next(name for name in PROMPT_FIELDS if name in fields)
    value = fields[name]
    later_turns: tuple[Messages, ...] = ()
    if name == "prompt" and defaults.wraps_in_chat and isinstance(value, str) and value:
        name, value = "messages", [{"role": "user", "content": value}]
    elif name == "turns":
        name, value = "messages", _messages_of_turns(value)
    own = _template_kwargs(fields, is_conversation=name == "messages")
    if name == "messages":
        _check_messages(value)
        value, *rest = _turns(value) if is_by_turns else [value]
        later_turns = tuple(rest)
        if defaults.system is not None and not any(message.get("role") == "system" for message in value):
            value = [{"role": "system", "content": defaults.system}, *value]
    kwargs = {**defaults.chat_template_kwargs, **own} if name == "messages" else {}
    return {name: value, KWARGS_FIELD: kwargs} if kwargs else {name: value}, later_turns


def _messages_of_turns(turns: Any) -> list[dict[str, str]]:
    """A user's texts as messages; a text alone is one turn. Raises RequestError."""
    texts = [turns] if isinstance(turns, str) else turns
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError.about("turns", expected="a list of texts", found=repr(turns)[:80])
    return [{"role": "user", "content": text} for text in texts]


def _check_messages(messages: Any) -> None:
    """Raises RequestError; the engine checks what is in them."""
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise RequestError.about("messages", expected="a list of objects", found=repr(messages)[:80])


def _turns(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """A turn ends with what the user says. Messages that have answers already are one turn."""
    roles = [message.get("role") for message in messages]
    if "assistant" in roles or "user" not in roles:
        return [messages]
    ends = [index + 1 for index, role in enumerate(roles) if role == "user"]
    return [messages[start:end] for start, end in zip([0, *ends], ends, strict=False)]


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


def _refusal(number: int, expected: str, found: str, hint: str) -> Refusal:
    return Refusal(row_id=number, error=problem("input row", expected=expected, found=found, hint=hint))
