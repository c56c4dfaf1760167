"""Threads that read prompts, outside the server's own: short texts; short conversations; long prompts.

Requests with a constraint go with the short conversations. A prompt that takes seconds to tokenize therefore delays
only other long ones, and a chat template or constraint that uses its whole time limit delays only its own kind. The
bytes that wait are bounded.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dflash_trt.core.errors import QueueFullError

SHORT_BYTES = 64 * 1024
MAX_WAITING_BYTES = 64 * 1024**2
_OVERHEAD_BYTES = 1024  # counted for every prompt, so that their number is bounded too


class PromptLanes:
    def __init__(self, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()  # guards the number below
        self._num_bytes = 0
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-short-prompts")
        self._slow = ThreadPoolExecutor(max_workers=2, thread_name_prefix="dflash-slow-prompts")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-long-prompts")

    def put(self, read: Callable[[], None], num_bytes: int, *, is_slow: bool = False) -> "Future[None]":
        """Queue a prompt of `num_bytes` for reading; the future can be cancelled while it waits.

        Raises:
            QueueFullError: too many bytes wait already. A prompt is always accepted if none waits.
        """
        num_bytes += _OVERHEAD_BYTES
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._max_waiting_bytes:
                expected = f"at most {self._max_waiting_bytes} bytes waiting to be tokenized"
                found = str(self._num_bytes + num_bytes)
                raise QueueFullError.about("prompts", expected=expected, found=found, hint="Try again later.")
            self._num_bytes += num_bytes
        lane = self._slow if is_slow else self._short
        if num_bytes > SHORT_BYTES:
            lane = self._long
        future = lane.submit(read)
        future.add_done_callback(lambda future: self._release(num_bytes))
        return future

    def close(self) -> None:
        """Stop; waiting prompts are never read."""
        for lane in (self._short, self._slow, self._long):
            lane.shutdown(wait=False, cancel_futures=True)

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes -= num_bytes
