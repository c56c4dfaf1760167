"""A worker: the process of one rank beside rank 0, and what is said between the two.

Knows processes and pipes, not what the words lead to. A worker is a fresh interpreter, not a copy of this one, so that
programs need no `if __name__ == "__main__"`.
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

from dflash_trt.core.batch import StepBatch
from dflash_trt.core.errors import DFlashError
from dflash_trt.executor.ranks.shard import ShardOptions

# What rank 0 says.


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenShard:
    """Open this rank's share of the engine."""

    engine_dir: str
    rank: int
    options: ShardOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    batch: StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLogits:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoOn:
    """All ranks raised at the same place: nothing is lost but the step."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Order = OpenShard | RunStep | RunLogits | GoOn | Stop

# What a worker says.


@dataclass(frozen=True, slots=True)
class Awake:
    """Everything is imported, and the others are awaited now."""


@dataclass(frozen=True, slots=True)
class Opened:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    fingerprint: bytes  # of what came of it; see `rank_shard.fingerprint`


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An order failed. `num_calls`: how many exchanges this rank had started."""

    reason: str  # the last line of the traceback
    traceback: str
    num_calls: int
    error_class: type[DFlashError] | None  # of an error that the user can fix


Report = Awake | Opened | Ran | Raised


class RankGoneError(Exception):
    """The worker's process has ended, or says nothing. The message says which, as something found."""

    def __init__(self, found: str, *, has_ended: bool = True) -> None:
        super().__init__(found)
        self.has_ended = has_ended


class RankProcess:
    """Rank 0's end of one worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._pipe, theirs = Pipe()
        # What this process can import, the worker can: its path may have been changed after the start.
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dflash_trt.executor.ranks.worker", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print belongs to nobody's result
        )
        theirs.close()
        self._told_s = time.monotonic()
        self._reason: str | None = None  # why it was killed

    @property
    def process_id(self) -> int:
        return self._process.pid

    def tell(self, order: Order) -> None:
        """Raises RankGoneError."""
        self._told_s = time.monotonic()
        try:
            self._pipe.send(order)
        except OSError as error:
            raise RankGoneError(self._ending()) from error

    def hear(self, timeout_s: float) -> Report:
        """The next report. Raises RankGoneError."""
        try:
            if not self._pipe.poll(timeout_s):
                silent_s = time.monotonic() - self._told_s
                raise RankGoneError(f"no answer for {silent_s:.0f} s", has_ended=False)
            report: Report = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RankGoneError(self._ending()) from error
        return report

    def wait(self) -> None:
        """Until the process has ended."""
        self._process.wait()

    @property
    def is_stopped(self) -> bool:
        """By a signal such as SIGSTOP; a debugger that holds it does not count."""
        try:
            return bool(psutil.Process(self.process_id).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def kill(self, reason: str | None = None) -> None:
        """`reason` is what is found from then on."""
        self._reason = self._reason or reason
        self._process.kill()

    def end(self, timeout_s: float) -> None:
        """Wait so long for the process to end by itself, then end it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe.close()

    def _ending(self) -> str:
        """How the process ended; its end of the pipe is closed."""
        if self._reason is not None:
            return self._reason
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "a process that hung up"
        return f"a process ended by {signal.Signals(-code).name}" if code < 0 else f"a process that exited with {code}"
