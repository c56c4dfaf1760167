"""Many requests whose outputs one thread collects: what `generate` and the benchmarks do."""

from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue

from dflash_trt.core.request import GenerationOutput
from dflash_trt.serving.stream import RequestStream


class StreamGroup:
    """Streams by a number of the caller's, for one thread. Outputs come in the order in which the requests end."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}
        self._news: SimpleQueue[tuple[int, bool]] = SimpleQueue()  # whose; True: it has ended

    def __len__(self) -> int:
        """The number of requests that run."""
        return len(self._streams)

    def start(self, number: int, submit: Callable[..., RequestStream], *, reads_as_it_comes: bool) -> None:
        """Add the stream of a new request; `submit` takes its `on_ready`.

        It is read when it has ended, in one go, or as it comes: so must those with stop strings be, which end thereby.
        """
        on_ready = partial(self._news.put, (number, False)) if reads_as_it_comes else None
        stream = self._streams[number] = submit(on_ready=on_ready)
        stream.call_at_end(partial(self._news.put, (number, True)))

    def next_output(self) -> tuple[int, GenerationOutput]:
        """Read until a request has ended; there must be one."""
        assert self._streams, "nothing runs"
        while (ended := self._read_one()) is None:
            pass
        return ended

    def read_ready(self) -> Iterator[tuple[int, GenerationOutput]]:
        """Read what is there, without waiting; the requests that have ended."""
        while not self._news.empty():
            if (ended := self._read_one()) is not None:
                yield ended

    def cancel(self) -> None:
        """End all of them."""
        for stream in self._streams.values():
            stream.cancel()

    def _read_one(self) -> tuple[int, GenerationOutput] | None:
        number, has_ended = self._news.get()
        if has_ended:
            return number, self._streams.pop(number).result()
        if number in self._streams:
            self._streams[number].take_steps()
        return None
