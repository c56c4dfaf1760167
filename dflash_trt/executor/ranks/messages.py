"""A worker's process, and the messages between it and rank 0.

A worker is a fresh interpreter and not a fork or a spawn, so that programs need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe

import psutil

from dflash_trt.core.errors import DFlashError
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.executor.ranks.shard import ShardOptions

# Orders of rank 0.


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenShard:
    """Open this rank's shard of the engine."""

    engine_dir: str
    rank: int
    options: ShardOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    plan: StepPlan


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

# Reports of a worker.


@dataclass(frozen=True, slots=True)
class Awake:
    """Everything is imported, and the rendezvous begins."""


@dataclass(frozen=True, slots=True)
class Opened:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    fingerprint: bytes  # of the outcome; see `shard.fingerprint`


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An order failed. `num_calls` counts the collectives that this rank had started."""

    reason: str  # the last line of the traceback
    traceback: str
    num_calls: int
    error_class: type[DFlashError] | None  # of an error that the user can fix


Report = Awake | Opened | Ran | Raised


class RankGoneError(Exception):
    """The worker's process has ended, or does not answer; the message says which."""

    def __init__(self, found: str, *, has_ended: bool = True) -> None:
        super().__init__(found)
        self.has_ended = has_ended


class RankProcess:
    """Rank 0's end of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._pipe, theirs = Pipe()
        # The current import path, which may differ from the one at the start.
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dflash_trt.executor.ranks.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=2,  # libraries must not print into the program's results
        )
        theirs.close()
        self._sent_s = time.monotonic()
        self._reason: str | None = None  # why it was killed

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, order: Order) -> None:
        """Raises RankGoneError."""
        self._sent_s = time.monotonic()
        try:
            self._pipe.send(order)
        except OSError as error:
            raise RankGoneError(self._ending()) from error

    def receive(self, timeout_s: float) -> Report:
        """Return the next report. Raises RankGoneError."""
        try:
            if not self._pipe.poll(timeout_s):
                silent_s = time.monotonic() - self._sent_s
                raise RankGoneError(f"no answer for {silent_s:.0f} s", has_ended=False)
            report: Report = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankGoneError(self._ending()) from error
        return report

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    @property
    def is_stopped(self) -> bool:
        """True if stopped by a signal such as SIGSTOP, but not by a debugger."""
        try:
            return bool(psutil.Process(self.process_id).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def kill(self, reason: str | None = None) -> None:
        """Kill the process; later errors give `reason`."""
        self._reason = self._reason or reason
        self._process.kill()

    def end(self, timeout_s: float) -> None:
        """Wait `timeout_s` for the process to end, then kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()

    def _ending(self) -> str:
        """Describe how the process ended, after it closed its end of the pipe."""
        if self._reason is not None:
            return self._reason
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        return (
            f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
        )
