"""Processes for untrusted work, which may loop forever, exhaust memory or overflow the stack.

A process starts with the first request and stays; one that broke a limit is replaced. The program of a process calls
`core/limited_worker.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, LifoQueue
from weakref import finalize

_NUM_PROCESSES = 2  # at most: a request that runs into the limit does not stop the others
_START_LIMIT_S = 60.0
_GRACE_S = 2.0  # the process ends itself at its limit; a stopped process delays its caller by at most this


class ProcessEndedError(Exception):
    """A request ended its process, or the process did not answer in time; the message says how."""


class LimitedProcesses:
    """Any thread may ask. The processes end with this object, and with the program."""

    def __init__(self, program: str, *arguments: str, time_limit_s: float) -> None:
        """`program` is the path of a Python file; it finds its `arguments` in sys.argv[3:]."""
        self._program = (program, *arguments)
        self._time_limit_s = time_limit_s
        self._idle: LifoQueue[_Process | None] = LifoQueue()  # None if not started
        for _ in range(_NUM_PROCESSES):
            self._idle.put(None)
        self._close = finalize(self, _end_all, self._idle)

    def start(self) -> None:
        """Have a process ready for the first request."""
        process = self._idle.get()
        try:
            process = process or self._new_process()
        finally:
            self._idle.put(process)

    def ask(self, request: bytes) -> bytes:
        """Raises ProcessEndedError."""
        process = self._idle.get()
        try:
            process = process or self._new_process()
            return process.ask(request)
        except BaseException:  # an interrupt, too: what the process says next would answer this request
            if process is not None:
                process.kill()
                process = None
            raise
        finally:
            self._idle.put(process)

    def _new_process(self) -> _Process:
        return _Process(self._program, self._time_limit_s)


class _Process:
    def __init__(self, program: Sequence[str], time_limit_s: float) -> None:
        file, *arguments = program
        self._time_limit_s = time_limit_s
        self._is_ready = False
        self._pipe, theirs = Pipe()
        # The current import path, which may differ from the one at the start, and this package.
        search_path = [path or os.getcwd() for path in sys.path] + [str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [_interpreter(), "-P", file, str(theirs.fileno()), str(time_limit_s), *arguments],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of libraries goes to stderr
            process_group=0,  # an interrupt of the terminal is for the program
        )
        theirs.close()

    def ask(self, request: bytes) -> bytes:
        """Raises ProcessEndedError; the process is of no use then."""
        try:
            if not self._is_ready:
                self._take(_START_LIMIT_S)
                self._is_ready = True
            self._pipe.send_bytes(request)
            return self._take(self._time_limit_s + _GRACE_S)
        except (EOFError, OSError) as error:
            raise ProcessEndedError(self._ending()) from error

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _take(self, timeout_s: float) -> bytes:
        if not self._pipe.poll(timeout_s):
            raise ProcessEndedError("nothing of it")
        return self._pipe.recv_bytes()

    def _ending(self) -> str:
        """How the process ended; its end of the pipe is closed."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "a process that hung up"
        if code == -signal.SIGALRM:
            return "one that takes longer"
        return f"a process ended by {signal.Signals(-code).name}" if code < 0 else f"a process that exited with {code}"


def _interpreter() -> str:
    """Triton's Python backend embeds Python: `sys.executable` need not be one."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    return str(Path(sys.prefix) / "bin" / "python3")


def _end_all(idle: LifoQueue[_Process | None]) -> None:
    while True:
        try:
            process = idle.get_nowait()
        except Empty:
            return
        if process is not None:
            process.kill()
