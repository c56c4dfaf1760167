"""Many streams read by one thread, as their tokens come: what `generate` and the benchmarks do."""

from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue

from dflash_trt.core.request import GenerationOutput
from dflash_trt.serving.stream import RequestStream


class StreamGroup:
    """Streams by a number of the caller's. Used by one thread."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}
        self._ready: SimpleQueue[int] = SimpleQueue()  # numbers of streams with something to take

    def __len__(self) -> int:
        """The number of requests that run."""
        return len(self._streams)

    def start(self, number: int, submit: Callable[..., RequestStream]) -> None:
        """Add the stream of a new request; `submit` takes its `on_ready`."""
        self._streams[number] = submit(on_ready=partial(self._ready.put, number))

    def next_output(self) -> tuple[int, GenerationOutput]:
        """Read until a request has ended; there must be one."""
        assert self._streams, "nothing runs"
        while (ended := self._read(self._ready.get())) is None:
            pass
        return ended

    def read_ready(self) -> Iterator[tuple[int, GenerationOutput]]:
        """Read what is there, without waiting; the requests that have ended by it."""
        while not self._ready.empty():
            if (ended := self._read(self._ready.get())) is not None:
                yield ended

    def cancel(self) -> None:
        """End all of them."""
        for stream in self._streams.values():
            stream.cancel()

    def _read(self, number: int) -> tuple[int, GenerationOutput] | None:
        stream = self._streams.get(number)
        chunks = stream.take_steps() if stream is not None else []
        if not chunks or chunks[-1].output is None:
            return None
        del self._streams[number]
        return number, chunks[-1].output
