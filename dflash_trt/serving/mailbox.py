"""One request's events on their way from the engine's thread to the reader, in order and unmerged.

Knows no text. The engine never waits: `put` costs it about a microsecond, whatever the reader does.
"""

import logging
import threading
from collections.abc import Callable

from dflash_trt.core.request import TokenEvent

_LOG = logging.getLogger(__name__)


Arrival = tuple[TokenEvent, float]  # an event, and when it came by the engine's clock


class Mailbox:
    """`put` and `run_callbacks` are the engine's, the other methods the reader's.

    With `max_pending_tokens` waiting, the engine pauses the request; the reader has it resumed when it has taken them.
    `on_ready` is called in the engine's thread when something comes into the empty mailbox.
    """

    def __init__(
        self, *, arrived_s: float, max_pending_tokens: int | None = None, on_ready: Callable[[], None] | None = None
    ) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.num_tokens = 0  # delivered, up to a cut
        self._max_pending_tokens = max_pending_tokens
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards the state below; held briefly
        self._arrivals: list[Arrival] = []
        self._num_pending_tokens = 0
        self._last: Arrival | None = None
        self._is_paused = False
        self._is_cut = False
        self._waiters: list[Callable[[], None]] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def last(self) -> Arrival | None:
        """The event that ended the request."""
        return self._last

    def put(self, event: TokenEvent, now: float) -> bool:
        """Hand an event over; True if the reader lags too far and the request must be paused.

        The reader calls for it to be resumed when it has taken the events.
        """
        arrival, num_tokens = (event, now), len(event.token_ids)
        with self._lock:
            assert self._last is None, "nothing comes after the end"
            was_empty = not self._arrivals
            self._arrivals.append(arrival)
            if num_tokens and not self._is_cut:
                self.num_tokens += num_tokens
                if self.first_token_s is None:
                    self.first_token_s = now
            if event.finish_reason is not None:
                self._last = arrival
            if self._max_pending_tokens is not None:
                self._num_pending_tokens += num_tokens
                self._is_paused = self._last is None and self._num_pending_tokens >= self._max_pending_tokens
            if self._waiters:
                waiters, self._waiters = self._waiters, []
            else:
                waiters = []
            is_paused = self._is_paused
        for wake in waiters:
            wake()
        if was_empty and self._on_ready is not None:
            _call(self._on_ready, event.request_id)
        return is_paused

    def run_callbacks(self) -> None:
        """Run the end callbacks; called after the last `put`, when the engine is ready to be called back."""
        assert self._last is not None
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, self._last[0].request_id)

    def take(self) -> tuple[list[Arrival], bool]:
        """All that has come since, and True if the engine is to resume the request."""
        with self._lock:
            arrivals, self._arrivals, self._num_pending_tokens = self._arrivals, [], 0
            was_paused, self._is_paused = self._is_paused, False
        return arrivals, was_paused

    def cut(self, num_tokens: int) -> None:
        """Count only the first tokens: a stop string ends the text there."""
        with self._lock:
            self._is_cut = True
            self.num_tokens = num_tokens

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something can be taken, or the request has ended; False after the time."""
        gate = threading.Lock()  # a condition costs the engine more
        gate.acquire()
        if not self.add_waiter(gate.release):
            return True
        try:
            return gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            self.remove_waiter(gate.release)

    def add_waiter(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called once, when something comes; False if something is there, or nothing will come."""
        with self._lock:
            if self._arrivals or self._last is not None:
                return False
            self._waiters.append(wake)
            return True

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if wake in self._waiters:
                self._waiters.remove(wake)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` run in the engine's thread at the end, or now if the request has ended."""
        with self._lock:
            if self._last is None:
                self._callbacks.append(callback)
                return
        callback()


def _call(callback: Callable[[], None], request_id: str) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - of the caller's making: the engine's thread must go on
        _LOG.exception("a callback of request %s failed", request_id)
