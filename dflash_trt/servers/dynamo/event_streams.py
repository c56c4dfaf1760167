"""Server-sent events of the front end, and the streams of several samples as one.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html (the format), OpenAI's API (`data: [DONE]`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any, Final

from dflash_trt.servers.dynamo.answers import joined_usage, with_metrics
from dflash_trt.servers.dynamo.api_fields import ENGINE_DATA

_END: Final = b"\n\n"
_DATA: Final = b"data: "
_ERROR: Final = b"event: error"
_DONE: Final = b"data: [DONE]"
_ENGINE_DATA: Final = f'"{ENGINE_DATA}"'.encode()


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
    """The events of one sample; only the last one, which tells what speculation did, is read."""
    async for event in events(chunks):
        if _ENGINE_DATA in event and event.startswith(_DATA):
            event = _event(with_metrics(json.loads(event[len(_DATA) :]), keeps_engine_data=keeps_engine_data))
        yield event + _END


async def joined_events(
    samples: Sequence[AsyncIterable[bytes]], *, keeps_engine_data: bool
) -> AsyncGenerator[bytes, None]:
    """The events of all samples as they come, each choice with the index of its sample, and one usage at the end.

    An error of one sample ends all.
    """
    queue: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async for event in sample_events(samples[index], keeps_engine_data=keeps_engine_data):
                queue.put_nowait((index, event.removesuffix(_END)))
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
            elif event.startswith(_ERROR):
                yield event + _END
                return
            elif event.startswith(_DATA) and event != _DONE:
                chunk = json.loads(event[len(_DATA) :])
                identity = identity or {"id": chunk["id"]}
                choices = [choice | {"index": index} for choice in chunk["choices"]]
                if choices:
                    yield _event(chunk | identity | {"choices": choices}) + _END
                else:
                    endings.append(chunk)
        if endings:
            usage = joined_usage([chunk["usage"] for chunk in endings])
            yield _event(endings[0] | identity | {"usage": usage}) + _END
        yield _DONE + _END
    finally:
        for reader in readers:
            reader.cancel()


def _event(chunk: dict[str, Any]) -> bytes:
    return _DATA + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode()
