"""Server-sent events of the front end, and the streams of several samples as one.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (the format), OpenAI's API (`data: [DONE]`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from http import HTTPStatus
from typing import Any, Final

from dflash_trt.servers.dynamo.answers import as_error_object, error_object, joined_usage, with_metrics
from dflash_trt.servers.dynamo.api_fields import ENGINE_DATA

_END: Final = b"\n\n"
_DATA: Final = b"data: "
_ERROR: Final = b"error"
_ERROR_NAME: Final = b"event: error"
_DONE: Final = b"data: [DONE]"
_ENGINE_DATA: Final = f'"{ENGINE_DATA}"'.encode()


class StreamError(Exception):
    """Ends a stream early; `body` is OpenAI's error object."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.body = body


def cut_stream() -> StreamError:
    message = "the stream has ended early: a process of the server was lost"
    return StreamError(error_object(HTTPStatus.SERVICE_UNAVAILABLE, message))


async def events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Whole events, without the empty line that ends each, however the network cut them."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(_END)
        for event in whole:
            yield event
    if rest.strip():
        yield rest


async def sample_events(chunks: AsyncIterable[bytes], *, keeps_engine_data: bool) -> AsyncGenerator[bytes, None]:
    """The events of one sample without [DONE]; only the last one, with speculation statistics, is parsed.

    Raises:
        StreamError: the front end reports an error, or its stream ends early.
    """
    async for event in events(chunks):
        if event == _DONE:
            return
        if _ERROR in event:
            _check(event)
        if _ENGINE_DATA in event and event.startswith(_DATA):
            event = _event(with_metrics(json.loads(event[len(_DATA) :]), keeps_engine_data=keeps_engine_data))
        yield event
    raise cut_stream()


async def joined_events(
    samples: Sequence[AsyncIterable[bytes]], *, keeps_engine_data: bool
) -> AsyncGenerator[bytes, None]:
    """The events of all samples as they come, with each choice's sample index, and one usage at the end.

    Raises:
        StreamError: raised by one sample; ends all of them.
    """
    queue: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async for event in sample_events(samples[index], keeps_engine_data=keeps_engine_data):
                queue.put_nowait((index, event))
        finally:
            queue.put_nowait((index, None))

    readers = [asyncio.create_task(read(index)) for index in range(len(samples))]
    endings: list[dict[str, Any]] = []
    identity: dict[str, Any] = {}
    num_open = len(samples)
    try:
        while num_open:
            index, event = await queue.get()
            if event is None:
                await readers[index]  # raises what has ended it
                num_open -= 1
            elif event.startswith(_DATA):
                chunk = json.loads(event[len(_DATA) :])
                identity = identity or {"id": chunk["id"]}
                choices = [choice | {"index": index} for choice in chunk["choices"]]
                if choices:
                    yield _event(chunk | identity | {"choices": choices})
                else:
                    endings.append(chunk)
        if endings:
            usage = joined_usage([chunk["usage"] for chunk in endings])
            yield _event(endings[0] | identity | {"usage": usage})
    finally:
        for reader in readers:
            reader.cancel()


async def closed_events(whole: AsyncGenerator[bytes, None], *, is_response: bool) -> AsyncGenerator[bytes, None]:
    """As clients get them: an error is an event, too, and [DONE] is the last in any case."""
    try:
        async for event in whole:
            yield event + _END
    except StreamError as error:
        name = _ERROR_NAME + b"\n" if is_response else b""
        fields = {**error.body["error"], "type": "error"} if is_response else {}
        yield name + _event(fields | error.body) + _END
    finally:
        await whole.aclose()
    yield _DONE + _END


def _check(event: bytes) -> None:
    """Raises StreamError: the event tells an error."""
    lines = event.split(b"\n")
    data = b"\n".join(line[len(_DATA) :] for line in lines if line.startswith(_DATA))
    try:
        found = json.loads(data)
    except ValueError:
        found = data.decode(errors="replace")
    if _ERROR_NAME in lines or (isinstance(found, dict) and found.get("error")):
        raise StreamError(as_error_object(found, HTTPStatus.INTERNAL_SERVER_ERROR))


def _event(chunk: dict[str, Any]) -> bytes:
    return _DATA + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
