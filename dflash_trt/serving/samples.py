"""The n samples of one prompt: one request each, sharing the prompt's pages, and one handle for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Final

from dflash_trt.core.errors import QueueFullError
from dflash_trt.core.request import GenerationOutput, Request
from dflash_trt.core.sampling import sample_seed
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.stream import RequestStream

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
