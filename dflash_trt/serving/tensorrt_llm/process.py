"""TensorRT-LLM in a process of another interpreter, spoken to over a socket, one JSON object a line.

ours    {"llm_args": {...}}, once; {"kind": "request", "id", "prompt", "params"}; {"kind": "cancel", "id"}
theirs  {"kind": "ready", "version"}, {"kind": "missing" | "failed", "error"}, once;
        {"kind": "tokens", "id", "token_ids", "logprobs"?, "top"?, "prompt"?}, of an iteration;
        {"kind": "end", "id", "reason", "error"?}
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import EngineDirError
from dflash_trt.core.logprobs import PromptScores, TokenLogprob
from dflash_trt.core.process import OwnProcess
from dflash_trt.serving.tensorrt_llm import worker
from dflash_trt.serving.tensorrt_llm.link import Answer, OnAnswer, OnLost, finish_reason

_END_TIMEOUT_S = 10.0


class TensorRTLLMMissingError(EngineDirError):
    """The interpreter has no tensorrt_llm."""


class WorkerProcess:
    """Implements Link. The process ends when this end of the socket is closed, however this program ends."""

    refused: Mapping[str, str] = {}

    def __init__(self, interpreter: str, llm_args: Mapping[str, Any], *, directory: Path) -> None:
        """Start it and wait until the model is loaded.

        Raises:
            TensorRTLLMMissingError: the interpreter cannot import tensorrt_llm.
            EngineDirError: there is no such interpreter, or TensorRT-LLM does not load the engine.
        """
        self._own_process = OwnProcess()
        self._lock = threading.Lock()  # guards writing
        self._thread: threading.Thread | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [interpreter, worker.__file__, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # output of libraries goes to stderr
                    process_group=0,  # an interrupt of the terminal is for the program
                )
            except OSError as error:
                self._socket.close()
                hint = "Set DFLASH_TRT_TRTLLM_PYTHON to the Python that has TensorRT-LLM."
                found = f"{interpreter} ({error.strerror})"
                raise EngineDirError.about("TensorRT-LLM", expected="a Python", found=found, hint=hint) from error
        self._lines = self._socket.makefile("rb")
        try:
            self._write({"llm_args": dict(llm_args)})
            self.version = self._ready(interpreter)
        except BaseException:
            self.close()
            raise

    def start(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        def listen() -> None:
            with suppress(OSError, ValueError):  # closed by us, or cut in the middle of a line
                while line := self._lines.readline():
                    on_answer(_answer(json.loads(line)))
            on_lost("the process of TensorRT-LLM has ended")

        self._thread = threading.Thread(target=listen, name="dflash-tensorrt-llm", daemon=True)
        self._thread.start()

    def send(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        self._write({"kind": "request", "id": request_id, "prompt": list(prompt), "params": dict(params)})

    def cancel(self, request_id: str) -> None:
        self._write({"kind": "cancel", "id": request_id})

    def close(self) -> None:
        if not self._own_process.is_this:
            return
        with suppress(OSError):  # the other end has hung up first
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self, interpreter: str) -> str:
        line = self._lines.readline()
        message = json.loads(line) if line else {"kind": "failed", "error": "the process ended while it loaded"}
        if message["kind"] == "ready":
            return str(message["version"])
        kind = TensorRTLLMMissingError if message["kind"] == "missing" else EngineDirError
        expected = "the package tensorrt_llm" if kind is TensorRTLLMMissingError else "an engine that it loads"
        raise kind.about(f"TensorRT-LLM in {interpreter}", expected=expected, found=message["error"])

    def _write(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")


def _answer(message: Mapping[str, Any]) -> Answer:
    if message["kind"] == "tokens":
        prompt = message.get("prompt")
        return Answer(
            request_id=message["id"],
            token_ids=tuple(message["token_ids"]),
            logprobs=tuple(message.get("logprobs", ())),
            top=_top(message),
            prompt=None if prompt is None else PromptScores.of(prompt["logprobs"], _top(prompt)),
        )
    reason = finish_reason(message["reason"])
    error = message.get("error")
    if reason == "error" and error is None:
        error = f"TensorRT-LLM ended it with {message['reason']!r}"
    return Answer(request_id=message["id"], finish_reason=reason, error=error)


def _top(message: Mapping[str, Any]) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(tuple(TokenLogprob(*entry) for entry in row) for row in message.get("top", ()))
