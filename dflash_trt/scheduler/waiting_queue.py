"""Requests that wait for a place, by priority."""

from bisect import insort
from collections.abc import Iterator

from dflash_trt.core.errors import QueueFullError
from dflash_trt.scheduler.sequence import Sequence


class WaitingQueue:
    """Ordered by priority, then arrival. A full queue refuses new arrivals, but not preempted requests."""

    def __init__(self, max_len: int | None = None) -> None:
        self._max_len = max_len
        self._sequences: list[Sequence] = []
        self._timed: list[Sequence] = []  # those that may wait only so long

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def add(self, sequence: Sequence) -> None:
        """Add a new arrival.

        Raises:
            QueueFullError: max_len requests are waiting.
        """
        check_queue(sequence, len(self._sequences), max_len=self._max_len)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Add a preempted request, before those that arrived after it."""
        insort(self._sequences, sequence, key=lambda waiting: waiting.priority_key)
        if sequence.request.queue_timeout_s is not None and sequence.admitted_s is None:
            self._timed.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        if sequence in self._timed:
            self._timed.remove(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Requests whose queue_timeout_s has passed before their first step."""
        return [sequence for sequence in self._timed if _is_expired(sequence, now)]


def check_queue(sequence: Sequence, num_waiting: int, *, max_len: int | None) -> None:
    """Raises QueueFullError: a new arrival is one too many."""
    if max_len is not None and num_waiting >= max_len:
        raise QueueFullError.about(
            f"request {sequence.request_id!r}",
            expected=f"fewer than {max_len} waiting requests",
            found=str(num_waiting),
            hint="Try again later, or raise max_queue_len.",
        )


def _is_expired(sequence: Sequence, now: float) -> bool:
    timeout_s = sequence.request.queue_timeout_s
    return timeout_s is not None and now - sequence.arrived_s >= timeout_s
