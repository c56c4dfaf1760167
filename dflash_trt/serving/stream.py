"""The answer to one request or to the n samples of one prompt, as its reader sees it.

Text is made here, in the reader's thread. The engine never waits. A reader that lags gets everything since its last
read as one chunk, so a stream holds no more than the request's own tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from dflash_trt.core.errors import QueueFullError
from dflash_trt.core.process import OwnProcess
from dflash_trt.core.request import FinishReason, GenerationOutput, Request
from dflash_trt.core.sampling import sample_seed
from dflash_trt.serving.output_processor import Mailbox, OutputProcessor, StreamChunk, merged


class EndRequest(Protocol):
    """Ends one request of an engine, from any thread: its last event comes soon, with this reason.

    Does nothing after the end. The reader calls it with "cancelled", with "stop" when it has found a stop string, and
    with "error" when the tokens cannot be turned into text.
    """

    def __call__(self, reason: FinishReason, error: str | None = None) -> None: ...


class RequestStream:
    """A request's answer: iterate over its chunks with `for` or `async for`, or wait for `result`.

    One reader at a time. Stop strings are found when the tokens are read: a request with stop strings that is never
    read runs until `max_pending_tokens` or its length ends it. Leaving a loop early does not end the request: call
    `cancel`, or use the stream as a context manager. A stream that is forgotten cancels its request.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        output_processor: OutputProcessor,
        *,
        end: EndRequest,
        resume: Callable[[], None] | None = None,
    ) -> None:
        """`resume` resumes a request that was paused because its tokens were not read."""
        self.request_id = output_processor.request.request_id
        self._mailbox = mailbox
        self._end = end
        self._reading = _Reading(mailbox, output_processor, end=end, resume=resume)
        self._own_process = OwnProcess()

    def __iter__(self) -> Iterator[StreamChunk]:
        while (chunk := self.take()) is not None:
            yield chunk

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        while (chunk := await self.take_async()) is not None:
            yield chunk

    def __enter__(self) -> RequestStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    @property
    def is_done(self) -> bool:
        """True when the engine has ended the request, read or not."""
        return self._mailbox.last is not None

    def take(self, timeout_s: float | None = None) -> StreamChunk | None:
        """The next chunk, waiting for one; None after the last.

        Raises:
            TimeoutError: none came within timeout_s.
            ForkError: this is a child that was forked from the engine's process.
        """
        self._own_process.check()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (chunks := self._reading.take()):
            if self._reading.output is not None:
                return None
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not self._mailbox.wait(left_s):
                raise TimeoutError(f"no token within {timeout_s} s")
        return merged(chunks)

    async def take_async(self) -> StreamChunk | None:
        """The same, without blocking the event loop."""
        chunks = await self._take_async(by_step=False)
        return merged(chunks) if chunks else None

    async def take_steps_async(self) -> list[StreamChunk]:
        """The chunks that are there, one for each step, waiting for one; empty after the last."""
        return await self._take_async(by_step=True)

    def take_steps(self) -> list[StreamChunk]:
        """The chunks that are there, one for each step, without waiting."""
        self._own_process.check()
        return self._reading.take(by_step=True)

    def result(self, timeout_s: float | None = None) -> GenerationOutput:
        """The finished output, whatever part of it was read as chunks. Reads the chunks that are left.

        Raises:
            TimeoutError: the next chunk took longer than timeout_s.
        """
        while self.take(timeout_s) is not None:
            pass
        output = self._reading.output
        assert output is not None
        return output

    async def result_async(self) -> GenerationOutput:
        """The same, without blocking the event loop."""
        while await self.take_async() is not None:
            pass
        output = self._reading.output
        assert output is not None
        return output

    async def _take_async(self, *, by_step: bool) -> list[StreamChunk]:
        self._own_process.check()
        loop = asyncio.get_running_loop()
        while not (chunks := self._reading.take(by_step=by_step)):
            if self._reading.output is not None:
                return []
            future: asyncio.Future[None] = loop.create_future()
            wake = partial(_waker_of(loop).wake, loop, future)
            if self._mailbox.add_waiter(wake):
                try:
                    await future
                finally:
                    self._mailbox.remove_waiter(wake)
        return chunks

    def cancel(self) -> None:
        """End the request now; a last chunk with finish_reason "cancelled" comes. Has no effect after the end."""
        self._end("cancelled")

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` run in the engine's thread at the end, whatever has been read; it must be quick."""
        self._mailbox.call_at_end(callback)

    def call_when_done(self, callback: Callable[[GenerationOutput], None]) -> None:
        """Have `callback` run in the engine's thread at the end, with the output; it must be quick.

        Unread text is made there, too: with many running requests, rather let a thread read them.
        """
        reading = self._reading  # not the stream, which may be forgotten
        self._mailbox.call_at_end(lambda: callback(reading.finish()))


class _Reading:
    """Events made into chunks, for the reader or for a callback at the end. Any thread may call it."""

    def __init__(
        self, mailbox: Mailbox, output_processor: OutputProcessor, *, end: EndRequest, resume: Callable[[], None] | None
    ) -> None:
        self._mailbox = mailbox
        self._output_processor = output_processor
        self._end = end
        self._resume = resume
        # guards the state below and the processor; never held when the engine's lock is taken
        self._lock = threading.Lock()
        self._unread: list[StreamChunk] = []  # but made
        self._is_end_known = False  # to the engine

    @property
    def output(self) -> GenerationOutput | None:
        return self._output_processor.output

    def take(self, *, by_step: bool = False) -> list[StreamChunk]:
        """The chunks so far."""
        chunks, was_paused = self._pop(by_step=by_step)
        early_end = self._output_processor.early_end
        if early_end is not None and not self._is_end_known:
            self._is_end_known = True
            self._mailbox.cut(self._output_processor.num_tokens)
            self._end(*early_end)
            chunks += self._pop(by_step=by_step)[0]
        elif was_paused and self._resume is not None:
            self._resume()
        return chunks

    def finish(self) -> GenerationOutput:
        """The output of a request that has ended; the chunks stay for the reader."""
        with self._lock:
            self._read(by_step=True)
        assert self.output is not None
        return self.output

    def _pop(self, *, by_step: bool) -> tuple[list[StreamChunk], bool]:
        """The chunks so far, and True if the request waits to be resumed."""
        with self._lock:
            was_paused = self._read(by_step=by_step)
            chunks, self._unread = self._unread, []
        return chunks, was_paused

    def _read(self, *, by_step: bool) -> bool:
        arrivals, was_paused = self._mailbox.take()
        for group in ([arrival] for arrival in arrivals) if by_step else filter(None, [arrivals]):
            chunk = self._output_processor.read(group)
            if chunk is not None:
                self._unread.append(chunk)
        return was_paused


class _LoopWaker:
    """Wakes the readers of one event loop: one call, which costs 10 us, for all readers of a step."""

    def __init__(self) -> None:
        self._futures: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def wake(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        """Called in the engine's thread."""
        self._futures.append(future)
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: no reader waits any more
                loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._is_scheduled = False  # first, so that nothing is added unseen
        while self._futures:
            future = self._futures.popleft()
            if not future.done():  # the reader may have been cancelled
                future.set_result(None)


_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopWaker] = WeakKeyDictionary()
_wakers_lock = threading.Lock()


def _waker_of(loop: asyncio.AbstractEventLoop) -> _LoopWaker:
    with _wakers_lock:
        return _wakers.setdefault(loop, _LoopWaker())


QUEUE_POLL_S: Final = 0.01


def samples_of(request: Request) -> list[Request]:
    """One request for each of `sampling.n`; sample 0 comes first and equals the request with n = 1.

    The others wait until it has computed the prompt. Only sample 0 has log probabilities of the prompt.
    """
    sampling = request.sampling
    if sampling.n == 1:
        return [request]
    others = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
    return [
        request,
        *(
            replace(
                request,
                request_id=f"{request.request_id}/{index}",
                sampling=others,
                seed=sample_seed(request.seed, index),
                sample_index=index,
                shares_prompt_of=request.request_id,
            )
            for index in range(1, sampling.n)
        ),
    ]


def joined_output(samples: Sequence[GenerationOutput]) -> GenerationOutput:
    """The output of a prompt: its sample 0, which holds the others."""
    first, *others = samples
    return replace(first, other_samples=tuple(others)) if others else first


class SampleStreams:
    """The answers to one prompt: iterate over chunks with `for` or `async for`, or wait for `result`.

    A chunk's `sample_index` names its sample. `cancel`, and the end of a `with` block, end all samples.

    A plain iteration and `result` block; one reader at a time, as with a RequestStream.
    """

    def __init__(self, num_samples: int, *, on_ready: Callable[[], None] | None = None) -> None:
        """`on_ready` is called in the engine's thread when there is something to take again."""
        self.streams: list[RequestStream] = []  # by sample index
        self._num_samples = num_samples
        self._on_ready = on_ready
        self._news: SimpleQueue[int] = SimpleQueue()  # whose

    def start(self, submit: Callable[..., RequestStream]) -> None:
        """Add the next sample's stream; `submit` takes its `on_ready`."""
        on_ready = partial(self._ring, len(self.streams)) if self._num_samples > 1 else self._on_ready
        self.streams.append(submit(on_ready=on_ready))

    async def start_when_possible(self, submit: Callable[..., RequestStream]) -> None:
        """The same; waits while the queue is full."""
        while True:
            try:
                return await asyncio.to_thread(self.start, submit)
            except QueueFullError:
                await asyncio.sleep(QUEUE_POLL_S)

    def chunks(self) -> Iterator[StreamChunk]:
        """All chunks; leaving the iterator ends the samples."""
        with self:
            yield from self

    def __iter__(self) -> Iterator[StreamChunk]:
        if self._num_samples == 1:
            yield from self.streams[0]
            return
        num_running = len(self.streams)
        while num_running:
            for chunk in self.streams[self._news.get()].take_steps():
                num_running -= chunk.output is not None
                yield chunk

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        waits = {asyncio.ensure_future(stream.take_async()): stream for stream in self.streams}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    stream, chunk = waits.pop(wait), wait.result()
                    if chunk is not None:
                        waits[asyncio.ensure_future(stream.take_async())] = stream
                        yield chunk
        finally:
            for wait in waits:
                wait.cancel()

    def __enter__(self) -> SampleStreams:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def take_steps(self) -> list[StreamChunk]:
        """The chunks that are there, one for each step of a sample, without waiting."""
        if self._num_samples == 1:
            return self.streams[0].take_steps()
        chunks: list[StreamChunk] = []
        while not self._news.empty():
            chunks += self.streams[self._news.get()].take_steps()
        return chunks

    def result(self) -> GenerationOutput:
        """The output of the prompt, when all samples have ended."""
        if self._num_samples > 1:
            for _ in self:  # those with stop strings are to be read as they come
                pass
        return joined_output([stream.result() for stream in self.streams])

    async def result_async(self) -> GenerationOutput:
        """The same, without blocking the event loop."""
        return joined_output(await asyncio.gather(*(stream.result_async() for stream in self.streams)))

    def cancel(self) -> None:
        """End all samples now."""
        for stream in self.streams:
            stream.cancel()

    def _ring(self, index: int) -> None:
        self._news.put(index)
        if self._on_ready is not None:
            self._on_ready()
