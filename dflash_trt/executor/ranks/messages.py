"""A worker's process, its connection to rank 0, and the messages between them.

A worker is a fresh interpreter and not a fork or a spawn, so that programs need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil

from dflash_trt.core.errors import DFlashError
from dflash_trt.core.step_plan import StepPlan, StepResult, StepRows
from dflash_trt.core.tcp import LOOPBACK
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.ranks.shard import ShardExecutor, ShardOptions, open_shard

if TYPE_CHECKING:
    from dflash_trt.backends.torch.process_group import ProcessRanks

_NO_ROWS: Final = StepRows(
    request_ids=(),
    sampling={},
    num_draft_tokens=0,
    **dict.fromkeys(("slot_ids", "num_tokens", "num_candidates", "context_lens", "token_ids"), np.zeros(0, np.int64)),
)

# Orders of rank 0.


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenShard:
    """Open this rank's shard of the engine."""

    engine_dir: str
    rank: int
    options: ShardOptions
    address: str = LOOPBACK  # of the rank's node

    def open(self, ranks: ProcessRanks) -> ShardExecutor:
        """Called in the worker, which has joined the others. Raises as `open_shard` does."""
        engine = EngineDir.open(self.engine_dir).with_draft_window(self.options.config.draft_window)
        return open_shard(engine, self.rank, ranks, self.options)


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """Run a step. Rows that repeat are not sent again."""

    plan: StepPlan
    repeats_rows: bool

    @classmethod
    def after(cls, before: StepRows | None, plan: StepPlan) -> RunStep:
        """`before` are the rows that were sent last."""
        repeats = plan.rows is before
        return cls(plan=replace(plan, rows=_NO_ROWS) if repeats else plan, repeats_rows=repeats)

    def plan_after(self, before: StepRows | None) -> StepPlan:
        """The plan, in a worker that got the rows `before` last."""
        if not self.repeats_rows:
            return self.plan
        assert before is not None
        return replace(self.plan, rows=before)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLogits:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoOn:
    """Continue: all ranks raised alike, so only the step is lost."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Order = OpenShard | RunStep | RunLogits | GoOn | Stop


def encoded(order: Order) -> bytes:
    """As `Connection.recv` reads it."""
    return pickle.dumps(order, pickle.HIGHEST_PROTOCOL)


# Reports of a worker.


@dataclass(frozen=True, slots=True)
class Awake:
    """Everything is imported, the rank has a GPU if it needs one, and the rendezvous begins."""


@dataclass(frozen=True, slots=True)
class Opened:
    place_files: dict[bool, int] = field(default_factory=dict)  # see ShardExecutor


@dataclass(frozen=True, kw_only=True)
class Ran:
    fingerprint: bytes  # hash of the outcome; see `shard.fingerprint`


@dataclass(frozen=True, kw_only=True)
class Returned:
    result: StepResult  # of this rank's own requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An order failed. `num_calls` counts the collectives that this rank had started."""

    reason: str  # the last line of the traceback
    traceback: str
    num_calls: int
    error_class: type[DFlashError] | None  # class of an error that the user can fix


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker has ended, for `rank` of the same node has; sent by the node."""

    rank: int
    reason: str


Report = Awake | Opened | Ran | Returned | Raised | Gone


class RankGoneError(Exception):
    """The worker's process has ended, or does not answer; the message says which.

    `rank` is that of the worker that ended first, where its node knows.
    """

    def __init__(self, found: str, *, has_ended: bool = True, rank: int | None = None) -> None:
        super().__init__(found)
        self.has_ended = has_ended
        self.rank = rank


class RankConnection(ABC):
    """Rank 0's end of the connection to one worker, here or on another node."""

    def __init__(self, rank: int, pipe: Connection[Order, Report]) -> None:
        self.rank = rank
        self._pipe = pipe
        self._sent_s = time.monotonic()
        self._gone: Gone | None = None  # why it has ended

    def send(self, order: Order) -> None:
        """Raises RankGoneError."""
        self.send_bytes(encoded(order))

    def send_bytes(self, order: bytes) -> None:
        """Send what `encoded` returned. Raises RankGoneError."""
        self._sent_s = time.monotonic()
        try:
            self._pipe.send_bytes(order)
        except OSError as error:
            raise self._ending(error) from error

    def receive(self, timeout_s: float) -> Report:
        """Return the next report. Raises RankGoneError."""
        try:
            if not self._pipe.poll(timeout_s):
                silent_s = time.monotonic() - self._sent_s
                raise RankGoneError(f"no answer for {silent_s:.0f} s", has_ended=False)
            report = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ending(error) from error
        if isinstance(report, Gone):
            raise self._ended_by(report)
        return report

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """True if stopped by a signal such as SIGSTOP, but not by a debugger."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the worker has ended."""

    @abstractmethod
    def kill(self, reason: str | None = None) -> None:
        """Kill the worker; later errors give `reason`."""

    @abstractmethod
    def end(self, timeout_s: float) -> None:
        """Wait `timeout_s` for the worker to end, then kill it."""

    @abstractmethod
    def _ending(self, error: Exception) -> RankGoneError:
        """How the worker ended, after the connection failed with `error`."""

    def _ended_by(self, gone: Gone) -> RankGoneError:
        """What its node says."""
        self._gone = self._gone or gone
        return RankGoneError(self._gone.reason, rank=self._gone.rank)


class WorkerProcess:
    """The process of a worker, which inherits the file descriptor of its end of the connection."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.rank = rank
        self._reason: str | None = None
        # The current import path, which may differ from the one at the start.
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dflash_trt.executor.ranks.worker", str(descriptor), str(os.getpid())],
            pass_fds=(descriptor,),
            env=os.environ | {"PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=2,  # libraries must not print into the program's results
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """True if stopped by a signal such as SIGSTOP, but not by a debugger."""
        try:
            return bool(psutil.Process(self.process_id).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    @property
    def has_stopped_as_asked(self) -> bool:
        """True if it has ended because rank 0 asked it to stop."""
        return self._process.poll() == 0

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def kill(self, reason: str | None = None) -> None:
        """Kill the process; `ending` gives `reason`."""
        self._reason = self._reason or reason
        self._process.kill()

    def end(self, timeout_s: float) -> None:
        """Wait `timeout_s` for the process to end, then kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ending(self, timeout_s: float) -> str | None:
        """How the process ended; None if it still runs after `timeout_s`."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return self._reason or f"its process {how}"


class RankProcess(WorkerProcess, RankConnection):
    """A worker on this machine."""

    def __init__(self, rank: int) -> None:
        pipe, theirs = Pipe()
        RankConnection.__init__(self, rank, pipe)
        WorkerProcess.__init__(self, rank, theirs.fileno())
        theirs.close()

    def end(self, timeout_s: float) -> None:
        super().end(timeout_s)
        self._pipe.close()

    def _ending(self, error: Exception) -> RankGoneError:
        return RankGoneError(self.ending(1.0) or "its process closed the connection")
