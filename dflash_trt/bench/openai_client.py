"""A client of an OpenAI server: sends one streamed request at a time, records times and outcome.

Knows the two endpoints and their events, but neither loads nor statistics.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector

from dflash_trt.bench.conversation import Conversation, RequestRecord
from dflash_trt.core.errors import ConfigError

_READ_BUFFER_BYTES = 2**22  # the last event of a long text has the lengths of all its steps
_DATA, _DONE = b"data:", b"[DONE]"


class OpenAIClient:
    """Sends requests for one model. `fields` go into every request."""

    def __init__(self, session: ClientSession, url: str, model: str, fields: Mapping[str, Any]) -> None:
        self._session = session
        self._url = url
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}

    async def ask(self, conversation: Conversation, **fields: Any) -> list[RequestRecord]:
        """All its requests, one after the other; none follows one that failed. `fields` win over all others."""
        own = {**self._fields, **conversation.fields, **fields}
        if conversation.prompt is not None:
            body = own | {"prompt": conversation.prompt}
            return [await self._request("completions", body, conversation.category)]
        records: list[RequestRecord] = []
        for _ in conversation.turns:
            messages = conversation.messages([record.text for record in records])
            record = await self._request("chat/completions", own | {"messages": messages}, conversation.category)
            records.append(record)
            if record.error is not None:
                break
        return records

    async def _request(self, path: str, body: Mapping[str, Any], category: str | None) -> RequestRecord:
        answer = _Answer()
        payload = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        started_s = time.perf_counter()
        try:
            async with self._session.post(f"{self._url}/v1/{path}", data=payload, headers=headers) as response:
                if response.status == 200:
                    await answer.read(response)
                else:
                    answer.error = f"status {response.status}: {(await response.text())[:300]}"
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return RequestRecord(
            category=category,
            started_s=started_s,
            content_s=tuple(answer.content_s),
            num_prompt_tokens=answer.usage.get("prompt_tokens", 0),
            num_output_tokens=answer.usage.get("completion_tokens", 0),
            text="".join(answer.pieces),
            speculation=answer.speculation,
            error=answer.error or answer.problem(),
        )


@asynccontextmanager
async def connected(url: str, fields: Mapping[str, Any], *, model: str | None) -> AsyncIterator[OpenAIClient]:
    """A client of the server at `url`, by default of its first model.

    Raises:
        ConfigError: no OpenAI server answers there.
    """
    connector = TCPConnector(limit=0)  # the load decides how many
    timeout = ClientTimeout(total=None, sock_connect=30)
    async with ClientSession(connector=connector, timeout=timeout, read_bufsize=_READ_BUFFER_BYTES) as session:
        yield OpenAIClient(session, url, model or await _first_model(session, url), fields)


async def _first_model(session: ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (ClientError, OSError, ValueError, LookupError, TypeError) as error:
        hint = "Pass the URL without /v1, such as http://127.0.0.1:8000."
        found = f"{type(error).__name__}: {error}"
        raise ConfigError.about(url, expected="an OpenAI server with a model", found=found, hint=hint) from error


class _Answer:
    """The events of one stream as they come."""

    def __init__(self) -> None:
        self.content_s: list[float] = []
        self.pieces: list[str] = []
        self.usage: Mapping[str, Any] = {}
        self.speculation: Mapping[str, Any] | None = None
        self.error: str | None = None
        self._has_ended = False

    async def read(self, response: ClientResponse) -> None:
        async for line in response.content:
            now_s = time.perf_counter()
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data != _DONE:
                self._event(json.loads(data), now_s)

    def _event(self, event: Mapping[str, Any], now_s: float) -> None:
        if "error" in event:
            self.error = str(event["error"])[:300]
        text = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            self._has_ended = self._has_ended or choice.get("finish_reason") is not None
        if text:
            self.pieces.append(text)
            self.content_s.append(now_s)
        self.usage = event.get("usage") or self.usage
        self.speculation = (event.get("metrics") or {}).get("speculative_decoding") or self.speculation

    def problem(self) -> str | None:
        """The defect of a stream that ended without an error; None if there is none."""
        if not self._has_ended:
            return "the stream ended without a finish_reason"
        if not self.content_s:
            return "the answer has no text"
        if not self.usage.get("completion_tokens"):
            return "the stream has no usage"
        return None
