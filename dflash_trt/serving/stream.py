"""The stream of one request's chunks, from the engine's thread to the reader.

The engine never waits. A reader that falls behind gets its chunks merged into one, so a stream holds no more than the
request's own tokens.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflash_trt.core.own_process import OwnProcess
from dflash_trt.core.request import FinishReason, GenerationOutput

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """Tokens and text since the last chunk. `text` is None without a tokenizer; the last chunk has the `output`.

    Text may lag behind the tokens, while it could be part of a character or of a stop string. `num_draft_tokens` were
    verified for these tokens, of which the target agreed with `num_accepted_tokens`.
    """

    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    output: GenerationOutput | None = None


def merged(chunks: Sequence[StreamChunk]) -> StreamChunk:
    """Several chunks of one request, at least one, as one."""
    return StreamChunk(
        text=None if chunks[0].text is None else "".join(chunk.text or "" for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        num_draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
        num_accepted_tokens=sum(chunk.num_accepted_tokens for chunk in chunks),
        finish_reason=chunks[-1].finish_reason,
        output=chunks[-1].output,
    )


class Mailbox:
    """The queue between engine and reader. Neither thread holds its lock for longer than a merge.

    With `max_pending_tokens` waiting, the engine pauses the request; it resumes when the reader has taken them. With
    `on_chunk` nothing is queued: each step's chunk goes to it at once, in the engine's thread.
    """

    def __init__(
        self,
        *,
        max_pending_tokens: int | None = None,
        resume: Callable[[], None] | None = None,
        on_chunk: Callable[[StreamChunk], None] | None = None,
    ) -> None:
        self._max_pending_tokens = max_pending_tokens
        self._resume = resume
        self._on_chunk = on_chunk
        self._is_paused = False
        self._own_process = OwnProcess()
        self._condition = threading.Condition()
        self._pending: list[StreamChunk] = []
        self._num_pending_tokens = 0
        self._output: GenerationOutput | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._callbacks: list[Callable[[GenerationOutput], None]] = []

    @property
    def output(self) -> GenerationOutput | None:
        return self._output

    def put(self, chunk: StreamChunk) -> None:
        """Add a chunk and wake the reader. Called by the engine, never blocks on the reader."""
        with self._condition:
            assert self._output is None, "nothing comes after the last chunk"
            if self._on_chunk is None:
                self._pending.append(chunk)
                self._num_pending_tokens += len(chunk.token_ids)
            self._output = chunk.output
            waiters, self._waiters = self._waiters, []
            self._condition.notify_all()
        for loop, future in waiters:
            _wake(loop, future)
        if self._on_chunk is not None:
            _call(self._on_chunk, chunk, "a request's chunks")

    def pause_if_full(self) -> bool:
        """Return True if the reader is too far behind; it will call `resume` when it takes the chunks."""
        with self._condition:
            if self._max_pending_tokens is None or self._output is not None:
                return False
            self._is_paused = self._num_pending_tokens >= self._max_pending_tokens
            return self._is_paused

    def run_callbacks(self) -> None:
        """Called by the engine after the last chunk, when it is ready to be called back."""
        with self._condition:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            assert self._output is not None
            _call(callback, self._output, f"request {self._output.request_id}")

    def take(self, timeout_s: float | None = None) -> StreamChunk | None:
        """The next chunk, waiting for one; None after the last.

        Raises:
            TimeoutError: none came within timeout_s.
            ForkError: this is a child that was forked from the engine's process.
        """
        self._own_process.check()
        with self._condition:
            if not self._condition.wait_for(lambda: self._pending or self._output, timeout_s):
                raise TimeoutError(f"no token within {timeout_s} s")
            chunk, was_paused = self._pop()
        self._after_taking(was_paused)
        return chunk

    async def take_async(self) -> StreamChunk | None:
        """The same, without blocking the event loop."""
        self._own_process.check()
        loop = asyncio.get_running_loop()
        while True:
            with self._condition:
                is_ready = bool(self._pending or self._output)
                if is_ready:
                    chunk, was_paused = self._pop()
                else:
                    future: asyncio.Future[None] = loop.create_future()
                    self._waiters.append((loop, future))
            if is_ready:
                self._after_taking(was_paused)
                return chunk
            await future

    def call_when_done(self, callback: Callable[[GenerationOutput], None]) -> None:
        """Run `callback` in the engine's thread at the end, or now if the request has ended. It must be quick."""
        with self._condition:
            if self._output is None:
                self._callbacks.append(callback)
                return
        callback(self._output)

    def _pop(self) -> tuple[StreamChunk | None, bool]:
        pending, self._pending, self._num_pending_tokens = self._pending, [], 0
        was_paused, self._is_paused = self._is_paused, False
        return (merged(pending) if pending else None), was_paused

    def _after_taking(self, was_paused: bool) -> None:
        """Outside the lock: the engine takes its own lock first and this one second."""
        if was_paused and self._resume is not None:
            self._resume()


class RequestStream:
    """A request's answer: iterate over its chunks, with `for` or `async for`, or wait for the whole `result`.

    One reader at a time. Leaving a loop early does not end the request: call `cancel`, or use the stream as a context
    manager. A stream that is forgotten cancels its request.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._mailbox = mailbox
        self._cancel = cancel

    def __iter__(self) -> Iterator[StreamChunk]:
        while (chunk := self.take()) is not None:
            yield chunk

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        while (chunk := await self._mailbox.take_async()) is not None:
            yield chunk

    def __enter__(self) -> "RequestStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    @property
    def is_done(self) -> bool:
        return self._mailbox.output is not None

    def take(self, timeout_s: float | None = None) -> StreamChunk | None:
        """The next chunk, waiting for one; None after the last.

        Raises:
            TimeoutError: none came within timeout_s.
        """
        return self._mailbox.take(timeout_s)

    def result(self, timeout_s: float | None = None) -> GenerationOutput:
        """The finished output, whatever part of it was read as chunks. Reads the chunks that are left.

        Raises:
            TimeoutError: the next chunk took longer than timeout_s.
        """
        while self.take(timeout_s) is not None:
            pass
        output = self._mailbox.output
        assert output is not None
        return output

    def cancel(self) -> None:
        """End the request now; a last chunk with finish_reason "cancelled" comes. Nothing happens after its end."""
        self._cancel()

    def call_when_done(self, callback: Callable[[GenerationOutput], None]) -> None:
        """Have `callback` run in the engine's thread at the end; it must be quick."""
        self._mailbox.call_when_done(callback)


def _call(callback: Callable[[_T], None], value: _T, whose: str) -> None:
    try:
        callback(value)
    except Exception:  # noqa: BLE001 - of the caller's making: the engine's thread must go on
        _LOG.exception("a callback of %s failed", whose)


def _wake(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[None]") -> None:
    def set_result() -> None:
        if not future.done():  # the reader may have been cancelled
            future.set_result(None)

    with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody waits any more
        loop.call_soon_threadsafe(set_result)
