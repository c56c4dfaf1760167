"""Threads that read prompts beside the server's own: for short texts, for short conversations and requests with
a constraint, for whatever is long.

So a prompt that takes seconds to tokenize delays other long ones only, and a chat template or a constraint that takes
its whole time delays others of its kind only. What waits is bounded in bytes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dflash_trt.core.errors import QueueFullError

SHORT_BYTES = 64 * 1024
MAX_WAITING_BYTES = 64 * 1024**2
_OVERHEAD_BYTES = 1024  # of any prompt, so that their number is bounded too


class PromptLanes:
    def __init__(self, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = threading.Lock()  # of the number below
        self._num_bytes = 0
        self._short = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-short-prompts")
        self._slow = ThreadPoolExecutor(max_workers=2, thread_name_prefix="dflash-slow-prompts")
        self._long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-long-prompts")

    def put(self, read: Callable[[], None], num_bytes: int, *, is_slow: bool = False) -> "Future[None]":
        """Have a prompt of so many bytes read; it may be taken back as long as it waits.

        Raises:
            QueueFullError: too much waits already. A prompt alone is always taken.
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
