"""A worker's process, and the messages between it and rank 0.

A worker is a fresh interpreter and not a fork or a spawn, so that programs need no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Final

import numpy as np
import psutil

from dflash_trt.core.errors import DFlashError
from dflash_trt.core.step_plan import StepPlan, StepRows
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
    """Everything is imported, and the rendezvous begins."""


@dataclass(frozen=True, slots=True)
class Opened:
    place_files: dict[bool, int] = field(default_factory=dict)  # see ShardExecutor


@dataclass(frozen=True, kw_only=True)
class Ran:
    fingerprint: bytes  # hash of the outcome; see `shard.fingerprint`


@dataclass(frozen=True, kw_only=True, slots=True)
class Raised:
    """An order failed. `num_calls` counts the collectives that this rank had started."""

    reason: str  # the last line of the traceback
    traceback: str
    num_calls: int
    error_class: type[DFlashError] | None  # class of an error that the user can fix


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
        self.send_bytes(encoded(order))

    def send_bytes(self, order: bytes) -> None:
        """Send what `encoded` returned. Raises RankGoneError."""
        self._sent_s = time.monotonic()
        try:
            self._pipe.send_bytes(order)
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
