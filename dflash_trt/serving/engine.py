"""The engine interface under LLM and the servers, for any runtime; `LocalEngine` implements it.

Knows requests, streams and neutral counts, but no steps, pages or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from dflash_trt.core.request import Request
    from dflash_trt.serving.detokenizer import Detokenizer
    from dflash_trt.serving.statistics import EngineStatistics
    from dflash_trt.serving.stream import RequestStream


class EngineLimits(Protocol):
    """Limits of requests, and the size of an engine."""

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def max_draft_len(self) -> int:
        """The maximum K; 0 without a drafter."""
        ...


class Engine(Protocol):
    """Serves requests from `start` to `close`. Any thread may call any method.

    An implementation makes each request a `Mailbox`, into which its thread puts TokenEvents, the last one with a
    finish_reason. The RequestStream takes them, makes text of them by an `OutputProcessor`, and tells the engine when
    it has found a stop string.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def start(self) -> None:
        """Begin to serve; the owner of the engine calls it once."""
        ...

    def submit(
        self,
        request: Request,
        detokenizer: Detokenizer | None = None,
        *,
        max_pending_tokens: int | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> RequestStream:
        """Submit a request; its answer comes through the stream. Without `detokenizer` there is no text.

        A request whose reader leaves `max_pending_tokens` unread is paused so that others can run; None means no limit.
        `on_ready` is called in the engine's thread when there is something to read again; it must be quick and neither
        read nor call back.

        Raises:
            RequestError: it can never run, the queue is full, the engine is closed, or an option is of a wrong kind.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request now; does nothing if there is no such request."""
        ...

    def statistics(self) -> EngineStatistics:
        """Everything measured so far; a copy."""
        ...

    @property
    def failure(self) -> str | None:
        """Reason why the engine serves no more, though it is not closed; None while it does."""
        ...

    def check_integrity(self) -> None:
        """Assert the engine's own invariants, as far as it has any: nothing is lost."""
        ...

    def close(self, *, drains: bool = False) -> None:
        """Refuse new requests, cancel running ones, or let them finish if `drains`, and release resources.

        It has no effect a second time, or in a forked child.
        """
        ...
