"""Renders chat templates in separate processes: a template may loop forever or exhaust memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.core.errors import RequestError, problem
from dflash_trt.core.limited_process import LimitedProcesses, ProcessEndedError
from dflash_trt.core.limited_worker import MAX_MEMORY_BYTES
from dflash_trt.engine_dir import template_worker
from dflash_trt.engine_dir.template_worker import OUT_OF_MEMORY, TEXT, TOO_LONG

TIME_LIMIT_S = 5.0

_MIB = 1024**2
# A conversation may be longer than its text: JSON spells a character with up to 6 bytes per byte, and templates leave
# out parts of old messages. One longer than this, and than 1 MiB, is refused unrendered.
_MAX_BYTES_PER_TEXT_BYTE = 8


class TemplateError(RequestError):
    """A template refuses a conversation, or breaks a limit: `found`."""

    def __init__(self, expected: str, found: str, *, hint: str) -> None:
        super().__init__(problem("chat prompt", expected=expected, found=found, hint=hint))
        self.found = found


class TemplateRenderer:
    """Any thread may render. The processes end with this object, and with the program."""

    def __init__(self, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._processes = LimitedProcesses(template_worker.__file__, time_limit_s=time_limit_s)

    def start(self) -> None:
        """Have a process ready for the first conversation."""
        self._processes.start()

    def render(
        self, template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, max_bytes: int | None = None
    ) -> str:
        """The text of a conversation up to where the assistant answers, limited to `max_bytes` if given.

        Raises:
            TemplateError: the template refuses the conversation, or breaks a limit.
            RequestError: the conversation is no JSON, or too long.
        """
        request = _request(template, messages, variables, max_bytes)
        try:
            answer = self._processes.ask(request)
        except ProcessEndedError as error:
            expected = f"the chat template's text within {self._time_limit_s:g} s"
            raise TemplateError(expected, str(error), hint="Change the messages, or the template.") from error
        return _text(answer, max_bytes)


def _request(template: str, messages: Sequence[Any], variables: Mapping[str, Any], max_bytes: int | None) -> bytes:
    try:
        document = {"messages": [dict(message) for message in messages], "variables": dict(variables)}
        request = json.dumps({"template": template, **document, "max_bytes": max_bytes}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError.about(
            "chat prompt",
            expected="messages and template options of JSON values",
            found=f"{type(error).__name__}: {error}",
            hint="Pass objects, lists, strings, numbers, true, false and null.",
        ) from error
    limit = max_conversation_bytes(max_bytes)
    if limit is not None and len(request) > limit:
        raise conversation_too_long(len(request), limit)
    return request


def max_conversation_bytes(max_text_bytes: int | None) -> int | None:
    """Limit of a conversation's JSON for texts of `max_text_bytes`; None means no limit."""
    return None if max_text_bytes is None else max(_MIB, _MAX_BYTES_PER_TEXT_BYTE * max_text_bytes)


def conversation_too_long(num_bytes: int, max_bytes: int) -> RequestError:
    expected, hint = f"at most {max_bytes} bytes of messages as JSON", "Shorten the messages."
    return RequestError.about("chat prompt", expected=expected, found=str(num_bytes), hint=hint)


def text_too_long(num_bytes: int, max_bytes: int) -> RequestError:
    expected = f"at most {max_bytes} bytes, as more text does not fit into max_seq_len tokens"
    hint = "Shorten the prompt, or build the engine with a larger max_seq_len."
    return RequestError.about("prompt", expected=expected, found=str(num_bytes), hint=hint)


def _text(answer: bytes, max_bytes: int | None) -> str:
    """Raises RequestError."""
    kind, body = answer[:1], answer[1:].decode(errors="surrogatepass")
    if kind == TEXT:
        return body
    if kind == TOO_LONG and max_bytes is not None:
        raise text_too_long(int(body), max_bytes)
    expected, found = "messages that the chat template takes, each with a role and a content", body
    if kind == OUT_OF_MEMORY:
        expected = f"a chat template that needs at most {MAX_MEMORY_BYTES // _MIB} MiB"
        found = "one that needs more"
    raise TemplateError(expected, found, hint="Change the messages.")
