"""The main loop of a process that answers requests within its limits, or ends.

A process can be stopped, a thread cannot. Imports only the standard library, so that a process is ready in a tenth of a
second.
"""

import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

MAX_MEMORY_BYTES = 512 * 1024**2  # beyond what a process has when it is ready


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests of LimitedProcesses. argv has the pipe's descriptor and the seconds per request."""
    pipe: Connection[bytes, bytes] = Connection(int(sys.argv[1]))
    time_limit_s = float(sys.argv[2])
    _limit_memory()
    pipe.send_bytes(b"")  # ready
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, OSError):
            return  # the caller has gone
        signal.setitimer(signal.ITIMER_REAL, time_limit_s)  # its signal ends the process, whatever it does
        answered = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answered)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a request that crashes the process fills no disk
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux; elsewhere this limit is not enforced
        num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
