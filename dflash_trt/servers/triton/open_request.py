"""A request in progress: its fields, its answer so far and its response channel. Knows no Triton API."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_trt.servers.triton.request_reader import Order
from dflash_trt.servers.triton.responses import Arrays, ResponseMaker
from dflash_trt.serving.output_processor import StreamChunk
from dflash_trt.serving.stream import SampleStreams

ErrorCode = Literal["INVALID_ARG", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"]


class Channel(Protocol):
    """Response channel of a request. Any thread may call it; after the last response it does nothing."""

    def send(self, arrays: Arrays, *, is_last: bool) -> None: ...

    def fail(self, message: str, code: ErrorCode) -> None:
        """The last response: an error, of this request alone."""
        ...

    def is_cancelled(self) -> bool: ...


@dataclass(eq=False, kw_only=True, slots=True)
class OpenRequest:
    """A request before its last response; `streams` and `makers` exist once its prompt is read.

    `unread` is its answer if its prompt is never read. `num_running` of its samples have not ended.
    """

    client_id: str
    channel: Channel
    order: Order
    reading: "Future[None] | None" = None
    is_cancelled: bool = False
    makers: Sequence[ResponseMaker] = ()  # one for each sample
    streams: SampleStreams | None = None
    num_running: int = 1
    unread: StreamChunk | None = None
