"""A running trtllm-serve: completions of token ids, streamed over HTTP; a connection and thread each."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from dflash_trt.core.errors import EngineDirError
from dflash_trt.serving.tensorrt_llm.link import Answer, OnAnswer, OnLost, finish_reason

_CONNECT_TIMEOUT_S = 10.0
_COMPLETIONS, _MODELS = "/v1/completions", "/v1/models"
_GUIDES = {"json": ("json", "schema"), "regex": ("regex", "regex"), "grammar": ("ebnf", "ebnf")}  # of response_format
_REFUSED = {
    "top_logprobs": "0, for the completions of trtllm-serve name tokens by their text",
    "prompt_logprobs": "None, for the completions of trtllm-serve have no such field",
    "bad_words": "none, for the completions of trtllm-serve have no such field",
    "min_tokens": "0, for the completions of trtllm-serve hold back only the tokenizer's own end of sequence",
}


class Server:
    """Implements Link. Hanging up ends a request."""

    refused: Mapping[str, str] = _REFUSED

    def __init__(self, url: str) -> None:
        """Raises EngineDirError: nothing at `url` speaks as trtllm-serve does."""
        self._url = urlsplit(url)
        self._lock = threading.Lock()  # guards the sockets
        self._sockets: dict[str, socket.socket | None] = {}  # by request; None until it is sent
        self._on_answer: OnAnswer = lambda answer: None
        self._answers = threading.Lock()  # one thread at a time tells
        subject, hint = (
            f"DFLASH_TRT_TRTLLM_URL {url}",
            "Start `trtllm-serve serve target --config llm_args.yaml` there.",
        )
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise EngineDirError.about(subject, expected="an http or https URL", found=repr(url), hint=hint)
        try:
            with self._connected(_CONNECT_TIMEOUT_S) as connection:
                connection.request("GET", f"{self._path}{_MODELS}")
                response = connection.getresponse()
                listed = json.loads(response.read()) if response.status == 200 else {}
                self.model = str(listed["data"][0]["id"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise EngineDirError.about(subject, expected="a running trtllm-serve", found=found, hint=hint) from error

    def start(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        """`on_lost` is never called: each request finds out for itself, and the server may come back."""
        self._on_answer = on_answer

    def send(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        body = {"model": self.model, "prompt": list(prompt), "stream": True, **_fields(params)}
        with self._lock:
            self._sockets[request_id] = None
        threading.Thread(
            target=self._run, args=(request_id, body), name=f"dflash-trtllm-{request_id}", daemon=True
        ).start()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            connected = self._sockets.pop(request_id, None)
        if connected is not None:
            with suppress(OSError):  # the other end has hung up first
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            request_ids = list(self._sockets)
        for request_id in request_ids:
            self.cancel(request_id)

    @property
    def _path(self) -> str:
        return self._url.path.rstrip("/")

    def _connected(self, timeout_s: float | None) -> closing[HTTPConnection]:
        assert self._url.hostname is not None
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        return closing(kind(self._url.hostname, self._url.port, timeout=timeout_s))

    def _run(self, request_id: str, body: Mapping[str, Any]) -> None:
        try:
            with self._connected(None) as connection:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", f"{self._path}{_COMPLETIONS}", json.dumps(body), headers)
                if self._is_wanted(request_id, connection.sock):
                    with connection.getresponse() as response:
                        self._pass_on(request_id, response)
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            found = f"trtllm-serve: {type(error).__name__}: {error}"
            self._tell(Answer(request_id=request_id, finish_reason="error", error=found))
        finally:
            with self._lock:
                self._sockets.pop(request_id, None)

    def _is_wanted(self, request_id: str, connected: socket.socket) -> bool:
        """False if the request was cancelled meanwhile; from now on, `cancel` hangs up."""
        with self._lock:
            if request_id not in self._sockets:
                return False
            self._sockets[request_id] = connected
        return True

    def _pass_on(self, request_id: str, response: HTTPResponse) -> None:
        for answer in _answers(request_id, response):
            self._tell(answer)
            if answer.finish_reason is not None:
                return
        self._tell(Answer(request_id=request_id, finish_reason="error", error="trtllm-serve hung up"))

    def _tell(self, answer: Answer) -> None:
        with self._answers:
            self._on_answer(answer)


def _fields(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a completion, from those of SamplingParams."""
    fields = dict(params)
    if "guided_decoding" in fields:
        ((name, guide),) = fields.pop("guided_decoding").items()
        kind, key = _GUIDES[name]
        fields["response_format"] = {"type": kind, key: json.loads(guide) if name == "json" else guide}
    if "embedding_bias" in fields:
        fields["logit_bias"] = fields.pop("embedding_bias")["biases"]
    if "logprobs" in fields:
        fields["logprobs"] = 1  # 0 is none there
    return fields


def _answers(request_id: str, response: HTTPResponse) -> Iterator[Answer]:
    """One answer per iteration, from the server-sent events of a completion."""
    if response.status != 200:
        raise OSError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
    for line in response:
        name, _, value = line.decode().partition(":")
        if name != "data" or value.strip() == "[DONE]":
            continue
        event = json.loads(value)
        if "error" in event or not event.get("choices"):
            if "error" in event:
                raise OSError(str(event["error"]))
            continue  # usage, at the end
        choice = event["choices"][0]
        token_ids = choice.get("token_ids")
        reason = finish_reason(choice.get("finish_reason"))
        if token_ids is None and reason is None:
            raise ValueError("no token_ids in its answer: expected TensorRT-LLM 1.4 or newer")
        error = f"it ended with {choice['finish_reason']!r}" if reason == "error" else None
        yield Answer(
            request_id=request_id,
            token_ids=tuple(token_ids or ()),
            logprobs=tuple((choice.get("logprobs") or {}).get("token_logprobs", ())),
            finish_reason=reason,
            error=error,
        )
