"""Chat templates rendered in processes of their own, because a template may loop for ever or eat all memory.

A process starts with the first conversation and stays; one that broke a limit is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any
from weakref import finalize

from dflash_trt.core.errors import RequestError, problem
from dflash_trt.engine_dir import template_worker
from dflash_trt.engine_dir.template_worker import MAX_MEMORY_BYTES, OUT_OF_MEMORY, TEXT, TOO_LONG

TIME_LIMIT_S = 5.0

_NUM_PROCESSES = 2  # at most: a conversation that runs into the limit does not stop the others
_START_LIMIT_S = 60.0
_GRACE_S = 2.0  # the process ends itself at its limit; should it be stopped, nobody waits for longer than this
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
        self._idle: LifoQueue[_Process | None] = LifoQueue()  # None: not started
        for _ in range(_NUM_PROCESSES):
            self._idle.put(None)
        self._close = finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Have a process ready for the first conversation."""
        self._idle.put(self._idle.get() or _Process(self._time_limit_s))

    def render(
        self, template: str, messages: Sequence[Any], variables: Mapping[str, Any], *, max_bytes: int | None = None
    ) -> str:
        """The text of a conversation up to where the assistant answers, at most `max_bytes` long where that is given.

        Raises:
            TemplateError: the template refuses the conversation, or breaks a limit.
            RequestError: the conversation is no JSON, or too long.
        """
        request = _request(template, messages, variables, max_bytes)
        process = self._idle.get()
        try:
            process = process or _Process(self._time_limit_s)
            answer = process.ask(request)
        except BaseException:  # an interrupt, too: what the process says next would answer this request
            if process is not None:
                process.kill()
                process = None
            raise
        finally:
            self._idle.put(process)
        return _text(answer, max_bytes)


class _Process:
    def __init__(self, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._is_ready = False
        self._pipe, theirs = Pipe()
        # The current import path, which may differ from the one at the start.
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        words = ["-P", template_worker.__file__, str(theirs.fileno()), str(time_limit_s)]
        self._process = subprocess.Popen(
            [_interpreter(), *words],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print belongs to nobody's result
            process_group=0,  # an interrupt of the terminal is for the program
        )
        theirs.close()

    def ask(self, request: bytes) -> bytes:
        """Raises RequestError; the process is of no use then."""
        try:
            if not self._is_ready:
                self._take(_START_LIMIT_S)
                self._is_ready = True
            self._pipe.send_bytes(request)
            return self._take(self._time_limit_s + _GRACE_S)
        except (EOFError, OSError) as error:
            raise self._refusal(self._ending()) from error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _take(self, timeout_s: float) -> bytes:
        if not self._pipe.poll(timeout_s):
            raise self._refusal("nothing of it")
        return self._pipe.recv_bytes()

    def _ending(self) -> str:
        """How the process ended; its end of the pipe is closed."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "a process that hung up"
        if code == -signal.SIGALRM:
            return "one that takes longer"
        return f"a process ended by {signal.Signals(-code).name}" if code < 0 else f"a process that exited with {code}"

    def _refusal(self, found: str) -> TemplateError:
        expected = f"the chat template's text within {self._time_limit_s:g} s"
        return TemplateError(expected, found, hint="Change the messages, or the template.")


def _interpreter() -> str:
    """Triton's Python backend embeds Python: `sys.executable` need not be one."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    return str(Path(sys.prefix) / "bin" / "python3")


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
        expected, hint = f"at most {limit} bytes of messages as JSON", "Shorten the messages."
        raise RequestError.about("chat prompt", expected=expected, found=str(len(request)), hint=hint)
    return request


def max_conversation_bytes(max_text_bytes: int | None) -> int | None:
    """As JSON, for a text of so many bytes; None: any number."""
    return None if max_text_bytes is None else max(_MIB, _MAX_BYTES_PER_TEXT_BYTE * max_text_bytes)


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


def _end_all(idle: LifoQueue[_Process | None]) -> None:
    while True:
        try:
            process = idle.get_nowait()
        except Empty:
            return
        if process is not None:
            process.kill()
