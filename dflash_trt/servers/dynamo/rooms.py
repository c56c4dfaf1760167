"""Connections of decode workers to a prefill worker, one for each prompt that one computes for the other.

A room is the front end's number of such a prompt. The decode worker keeps the connection open while it wants the
prompt, the prefill worker until all of it is written, so that each learns of the other's end, whatever it was.

    decode worker: the room, 8 bytes
    prefill worker: {"engine": ...}, then {"error": ..., "is_full": ...}, a line each

Between the two are blocks that it sends from its memory, as they are written: {"sender": ..., "blocks": [...]}, where
the sender is base64 of NIXL's metadata.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from dflash_trt.core.errors import QueueFullError, RequestError
from dflash_trt.core.tcp import limit_silence
from dflash_trt.serving.nixl_blocks import BlockReceiver, BlockSender, RemoteBlock

_MAX_ROOMS: Final = 4096  # of those that have ended, too: their decode workers may still come
_BEGINS_S: Final = 5.0  # until the front end's request for a room has come
_CONNECT_S: Final = 2.0
_ROOM_BYTES: Final = 8
_BLOCKS_PER_LINE: Final = 100
_HELD_S: Final = 10.0  # blocks of a room that has ended: its decode worker may still read them


@dataclass(slots=True, eq=False)
class _Room:
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Callable[[], None] | None = None
    error: str | None = None
    is_full: bool = False
    is_left: bool = False  # by the decode worker, before the prompt was begun
    blocks: list[RemoteBlock] = field(default_factory=list)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)  # blocks, or the end

    def add(self, blocks: Sequence[RemoteBlock]) -> None:
        self.blocks += blocks
        self.has_news.set()

    def end(self) -> None:
        self.cancel = None
        self.has_ended.set()
        self.has_news.set()


def port_of(server: asyncio.Server) -> int:
    port: int = server.sockets[0].getsockname()[1]
    return port


class Rooms:
    """A prefill worker's. `engine` names its engine and settings to decode workers, `sender` has its blocks, if any."""

    def __init__(self, engine: str | None, sender: BlockSender | None = None) -> None:
        self._engine = engine
        self._sender = sender
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
            room.end()

    def offer(self, number: int, keys: Sequence[bytes]) -> None:
        """Tell the decode worker of the blocks of these keys as they are written, and hold them for a while."""
        if self._sender is None:
            return
        room, loop = self._room(number), asyncio.get_running_loop()
        end = self._sender.watch(keys, lambda blocks: _call_in(loop, room.add, blocks))

        def let_go() -> None:
            end()
            room.blocks = []

        asyncio.ensure_future(room.has_ended.wait()).add_done_callback(lambda _: loop.call_later(_HELD_S, let_go))

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
                if await self._tell(room, writer, leaving):
                    _send(writer, error=room.error, is_full=room.is_full)
                elif room.cancel is not None:
                    room.cancel()
            else:
                room.is_left = leaving.done()
            leaving.cancel()
            await writer.drain()
        writer.close()

    async def _tell(self, room: _Room, writer: asyncio.StreamWriter, leaving: asyncio.Future[Any]) -> bool:
        """Tell of the room's blocks until it has ended; False if the decode worker leaves before."""
        num_told = 0
        while not leaving.done():
            room.has_news.clear()
            while new := room.blocks[num_told : num_told + _BLOCKS_PER_LINE]:
                assert self._sender is not None
                _send(writer, sender=b64encode(self._sender.metadata).decode(), blocks=new)
                await writer.drain()
                num_told += len(new)
            if room.has_ended.is_set():
                return True
            await _first(room.has_news, leaving)
        return False


@asynccontextmanager
async def visiting(
    info: dict[str, Any], engine: str | None, receiver: BlockReceiver | None = None
) -> AsyncIterator[asyncio.Future[None]]:
    """A decode worker's connection to a room; the future is done when the prefill worker has ended it, or has died.

    `receiver` learns of the blocks that the prefill worker sends.

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
        ended = asyncio.ensure_future(_ended(reader, engine, receiver))
        yield ended
    finally:
        ended.cancel()
        writer.close()


async def _ended(reader: asyncio.StreamReader, engine: str | None, receiver: BlockReceiver | None) -> None:
    error, is_full = None, False
    with suppress(OSError, ValueError):  # a line that was cut by a death, too
        async for line in reader:
            fields = json.loads(line)
            if fields.get("engine", engine) != engine:
                raise RequestError.about(
                    "prefill worker",
                    expected=f"one with the engine and settings of this one, {engine}",
                    found=str(fields["engine"]),
                    hint="Start prefill and decode workers with the same engine, device, drafter and transfer options.",
                )
            if receiver is not None and "blocks" in fields:
                blocks = [RemoteBlock(*block) for block in fields["blocks"]]
                await asyncio.to_thread(receiver.learn, b64decode(fields["sender"]), blocks)
            error, is_full = fields.get("error"), fields.get("is_full", False)
    if error is not None:
        raise (QueueFullError if is_full else RequestError)(error)


async def _first(event: asyncio.Event, other: asyncio.Future[Any], *, timeout_s: float | None = None) -> bool:
    """True if the event came first."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting, other}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return event.is_set()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *given: Any) -> None:
    """From any thread, and after the loop's end to no effect."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *given)


def _send(writer: asyncio.StreamWriter, **fields: Any) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")
