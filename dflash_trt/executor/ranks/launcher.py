"""Lifecycle of an engine's workers, and the errors for those that fail."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import finalize

from dflash_trt.backends.torch.process_group import ExchangeError
from dflash_trt.core.errors import DFlashError, RankError
from dflash_trt.core.process import OwnProcess
from dflash_trt.executor.ranks.messages import (
    OpenShard,
    Order,
    Raised,
    RankConnection,
    RankGoneError,
    RankProcess,
    Report,
    Stop,
    WorkerProcess,
    encoded,
)

if TYPE_CHECKING:
    from dflash_trt.executor.ranks.nodes import Nodes

Reports = Sequence[Report | RankGoneError]  # from ranks 1, 2, ...

_END_TIMEOUT_S = 5.0
_LOOK_S = 1.0  # polling interval of watched workers
_MAX_STOPPED_LOOKS = 3  # in a row; a terminal that stops and continues all ranks causes fewer
_OPEN_AGAIN = "All ranks were ended. LLM and servers open the engine again by themselves: send the request again."

_START_AGAIN = "All ranks were ended, on all nodes. Start the engine on every node again."

_LOG = logging.getLogger(__name__)


class RankWorkers:
    """All workers. They end with `close`, with this object, and with the program."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        """`nodes` has the ranks of other nodes, and is closed with the workers."""
        self.directory = Path(tempfile.mkdtemp(prefix="dflash-ranks-"))  # for the rendezvous
        self._nodes = nodes
        self._processes: list[RankConnection] = []
        self._is_closing = threading.Event()
        self._is_watched = threading.Event()
        self._own_process = OwnProcess()
        # Called when the workers have ended, before the directory goes.
        self.at_end: list[Callable[[], None]] = [] if nodes is None else [nodes.close]
        ends = (self._processes, self.at_end, self.directory, self._is_closing, self._own_process)
        self.close = finalize(self, _end, *ends)
        watch = (self._processes, self._is_watched, self._is_closing)
        threading.Thread(target=end_stopped, args=watch, name="dflash-ranks", daemon=True).start()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the workers on this machine."""
        return tuple(process.process_id for process in self._processes if isinstance(process, RankProcess))

    @property
    def hint(self) -> str:
        """How to go on after a failure."""
        return _OPEN_AGAIN if self._nodes is None else _START_AGAIN

    def start(self, order: OpenShard) -> None:
        """Start the worker of the next rank, unless it has been started on another node."""
        remote = None if self._nodes is None else self._nodes.take(order.rank)
        process = remote or RankProcess(order.rank)
        self._processes.append(process)
        process.send(order if remote is None else remote.localized(order))

    def send(self, order: Order) -> None:
        """Raises RankGoneError."""
        content = encoded(order)
        for process in self._processes:
            process.send_bytes(content)

    def send_each(self, orders: Sequence[Order]) -> None:
        """One order to each worker. Raises RankGoneError."""
        for process, order in zip(self._processes, orders, strict=True):
            process.send(order)

    def receive(self, timeout_s: float) -> list[Report | RankGoneError]:
        """Return the next report of each worker, all within `timeout_s`, or the RankGoneError instead of it."""
        end_s = time.monotonic() + timeout_s
        reports: list[Report | RankGoneError] = []
        for process in self._processes:
            try:
                reports.append(process.receive(max(0.0, end_s - time.monotonic())))
            except RankGoneError as error:
                reports.append(error)
        return reports

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Kill workers that are stopped (SIGSTOP), so that this rank does not wait for them."""
        self._is_watched.set()
        try:
            yield
        finally:
            self._is_watched.clear()

    def forget_directory(self) -> None:
        """Remove the directory after the rendezvous; it would remain if this program were killed."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """Close without waiting: workers may be blocked by a rank that has ended."""
        if not self._own_process.is_this:
            return
        self._is_closing.set()
        for process in self._processes:
            process.kill()
        self.close()

    def when_one_ends(self, act: Callable[[], None]) -> None:
        """Call `act` from a thread as soon as a worker ends unexpectedly."""
        for process in self._processes:
            threading.Thread(target=_watch, args=(process, self._is_closing, act), daemon=True).start()


def explained_failure(reports: Reports, error: Exception | None, *, hint: str = _OPEN_AGAIN) -> DFlashError:
    """The error of the rank that failed first. `error` is rank 0's, often a consequence of another rank's.

    `hint` says how to go on.
    """
    num_ranks = len(reports) + 1
    raised = {rank: report for rank, report in enumerate(reports, start=1) if isinstance(report, Raised)}
    gone = {rank: report for rank, report in enumerate(reports, start=1) if isinstance(report, RankGoneError)}
    for rank, failure in raised.items():
        if failure.error_class is not None:
            return failure.error_class(f"rank {rank} of {num_ranks}: {failure.reason}")
    for rank, silence in gone.items():
        if silence.has_ended:
            return _rank_error(silence.rank or rank, num_ranks, str(silence), hint)
    if raised:  # the rank with the fewest collectives: the others failed because it was missing
        rank = min(raised, key=lambda rank: raised[rank].num_calls)
        _LOG.error("rank %d of %d failed:\n%s", rank, num_ranks, raised[rank].traceback)
        return _rank_error(rank, num_ranks, raised[rank].reason, hint)
    if error is not None and not (gone and isinstance(error, ExchangeError)):
        return _rank_error(0, num_ranks, f"{type(error).__name__}: {error}", hint)
    for rank, silence in gone.items():
        return _rank_error(rank, num_ranks, str(silence), hint)
    expected = "the same tokens and log-probabilities on all ranks"
    hint = f"{hint} If it happens again, check for different software on the ranks, and for broken memory."
    return RankError.about(f"{num_ranks} ranks", expected=expected, found="a difference", hint=hint)


def _rank_error(rank: int, num_ranks: int, found: str, hint: str) -> RankError:
    return RankError(f"rank {rank} of {num_ranks} failed: {found}. {hint}")


def _watch(process: RankConnection, is_closing: threading.Event, act: Callable[[], None]) -> None:
    process.wait()
    if not is_closing.is_set():
        act()


def end_stopped(
    processes: Sequence[RankConnection | WorkerProcess], is_watched: threading.Event, is_closing: threading.Event
) -> None:
    """Kill processes that are stopped while `is_watched`, in a thread until `is_closing`."""
    num_looks: dict[int, int] = {}
    while not is_closing.wait(_LOOK_S):
        for process in tuple(processes):
            is_stopped = is_watched.is_set() and process.is_stopped
            num_looks[process.rank] = num_looks.get(process.rank, 0) + 1 if is_stopped else 0
            if num_looks[process.rank] >= _MAX_STOPPED_LOOKS:
                stopped_s = _LOOK_S * num_looks[process.rank]
                process.kill(f"its process was stopped by a signal such as SIGSTOP for {stopped_s:.0f} s")


def _end(
    processes: Sequence[RankConnection],
    at_end: Sequence[Callable[[], None]],
    directory: Path,
    is_closing: threading.Event,
    own_process: OwnProcess,
) -> None:
    """Ask the workers to stop, then kill them. Does nothing in a forked child."""
    if not own_process.is_this:
        return
    is_closing.set()
    for process in processes:
        try:
            process.send(Stop())
        except RankGoneError:
            continue
    end_s = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        process.end(max(0.0, end_s - time.monotonic()))
    try:
        for act in at_end:
            act()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
