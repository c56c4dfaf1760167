"""Connections of decode workers to a prefill worker, one for each prompt that one computes for the other.

A room is the front end's number of such a prompt. The decode worker keeps the connection open while it wants the
prompt, the prefill worker until all of it is written, so that each learns of the other's end, whatever it was.

    decode worker: the room, 8 bytes
    prefill worker: {"engine": ...}, then {"error": ..., "is_full": ...}, a line each
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.tcp import limit_silence

_MAX_ROOMS: Final = 4096  # of those that have ended, too: their decode workers may still come
_BEGINS_S: Final = 5.0  # until the front end's request for a room has come
_CONNECT_S: Final = 2.0
_ROOM_BYTES: Final = 8


@dataclass(slots=True, eq=False)
class _Room:
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Callable[[], None] | None = None
    error: str | None = None
    is_full: bool = False
    is_left: bool = False  # by the decode worker, before the prompt was begun


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


class Rooms:
    """A prefill worker's. `engine` names its engine and settings to decode workers."""

    def __init__(self, engine: str | None) -> None:
        self._engine = engine
        self._rooms: OrderedDict[int, _Room] = OrderedDict()

    async def listen(self, host: str) -> asyncio.Server:
        return await asyncio.start_server(self._visited, host, 0)

    @contextmanager
    def computing(self, number: int, cancel: Callable[[], None]) -> Iterator[None]:
        """Tell the decode worker when the block ends, and of an error; `cancel` is called when that worker leaves."""
        room = self._room(number)
        room.cancel = cancel
        room.has_begun.set()
        try:
            yield
        except RequestError as error:
            room.error, room.is_full = str(error), isinstance(error, QueueFullError)
            raise
        finally:
            room.cancel = None
            room.has_ended.set()

    def is_left(self, number: int | None) -> bool:
        """The decode worker has left before the prompt was begun: its client had, or it had all blocks."""
        room = None if number is None else self._rooms.get(number)
        return room is not None and room.is_left

    def _room(self, number: int) -> _Room:
        if number not in self._rooms and len(self._rooms) >= _MAX_ROOMS:
            self._rooms.popitem(last=False)
        return self._rooms.setdefault(number, _Room())

    async def _visited(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            limit_silence(writer.get_extra_info("socket"))
            room = self._room(int.from_bytes(await reader.readexactly(_ROOM_BYTES)))
            _send(writer, engine=self._engine)
            leaving = asyncio.ensure_future(reader.read())
            if await _first(room.has_begun, leaving, timeout_s=_BEGINS_S):
                if await _first(room.has_ended, leaving):
                    _send(writer, error=room.error, is_full=room.is_full)
                elif room.cancel is not None:
                    room.cancel()
            else:
                room.is_left = leaving.done()
            leaving.cancel()
            await writer.drain()
        writer.close()


@asynccontextmanager
async def visiting(info: dict[str, Any], engine: str | None) -> AsyncIterator[asyncio.Future[None]]:
    """A decode worker's connection to a room; the future is done when the prefill worker has ended it, or has died.

    Raises:
        RequestError: the prefill worker has another engine, or other settings; or the future has what it refused.
    """
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        opening = asyncio.open_connection(info["bootstrap_host"], info["bootstrap_port"])
        reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
    except (OSError, TimeoutError):  # it has died since
        ended.set_result(None)
        yield ended
        return
    try:
        limit_silence(writer.get_extra_info("socket"))
        writer.write(int(info["bootstrap_room"]).to_bytes(_ROOM_BYTES))
        ended = asyncio.ensure_future(_ended(reader, engine))
        yield ended
    finally:
        ended.cancel()
        writer.close()


async def _ended(reader: asyncio.StreamReader, engine: str | None) -> None:
    lines: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):  # a line that was cut by a death, too
        lines.append(json.loads(await reader.readline()))
        lines.append(json.loads(await reader.readline()))
    found = lines[0].get("engine") if lines else engine
    if found != engine:
        raise RequestError.about(
            "prefill worker",
            expected=f"one with the engine and settings of this one, {engine}",
            found=str(found),
            hint="Start prefill and decode workers with the same engine, device and drafter options.",
        )
    if len(lines) > 1 and lines[1]["error"] is not None:
        raise (QueueFullError if lines[1]["is_full"] else RequestError)(lines[1]["error"])


async def _first(event: asyncio.Event, other: asyncio.Future[Any], *, timeout_s: float | None = None) -> bool:
    """True if the event came first."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return event.is_set()


def _send(writer: asyncio.StreamWriter, **fields: Any) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")
