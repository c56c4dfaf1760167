"""Detects, inside the model process, that the server is stopping or has died.

Triton does not notify models: after SIGTERM it waits for running requests until its exit timeout kills everything.
Observable signs (with Triton 2.51.0, in Linux's /proc):

1. its main thread sleeps through all service; while it stops, it wakes once per second to count what is left;
2. it answers no new HTTP connection while it waits for HTTP streams;
3. it answers its own models "not ready" while it waits for anything else.

The first is cheap and only a suspicion; it takes the second or the third to believe it. The third is asked by a
request, and only then: after one, a client that leaves early can keep the model from being unloaded.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")
_SERVER_NAME = "tritonserver"
_WINDOW_S = 4.0
_NUM_WAKES = 2  # wake-ups of the main thread within the window
_ANSWER_S = 1.0
_HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

_LOG = logging.getLogger(__name__)


class ServerWatch:
    """Watches the parent process, the server. `is_ready` asks it whether the model is ready."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._pid = os.getppid()
        self._is_ready = is_ready
        self._http_ports: list[tuple[str, int]] = []
        self._wakes: deque[tuple[float, int]] = deque()

    def requests_come(self) -> None:
        """To be called with the first request, when the server has its ports open."""
        self._http_ports = [address for address in _listening(self._pid) if _is_answered(address)]
        if not self._http_ports:
            _LOG.warning("no HTTP port of the server found: its stop can be detected through gRPC only")

    def is_stopping(self) -> bool:
        """True if the server has begun to stop; it never returns from that. To be called about twice a second."""
        if not self._is_main_thread_awake():
            return False
        if not self._is_ready():
            return True
        return not all(_is_answered(address) for address in self._http_ports)  # the port of the metrics still answers

    def is_gone(self) -> bool:
        """True if the server has died and left this process running."""
        return os.getppid() != self._pid

    def _is_main_thread_awake(self) -> bool:
        now, count = time.monotonic(), _num_wakes(self._pid)
        self._wakes.append((now, count))
        while self._wakes[0][0] < now - _WINDOW_S:
            self._wakes.popleft()
        return count - self._wakes[0][1] >= _NUM_WAKES


def stop_server() -> bool:
    """Ask the server that started this process to stop; False if it is part of another program."""
    pid = os.getppid()
    with contextlib.suppress(OSError):
        if (_PROC / str(pid) / "comm").read_text().strip() == _SERVER_NAME:
            os.kill(pid, signal.SIGTERM)
            return True
    return False


def _num_wakes(pid: int) -> int:
    """How often the main thread of a process went to sleep by itself; 0 where that cannot be seen."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "task" / str(pid) / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0


def _is_answered(address: tuple[str, int]) -> bool:
    """True if one of Triton's HTTP services is there and answers; the metrics are such a service, too."""
    try:
        with socket.create_connection(address, timeout=_ANSWER_S) as connection:
            connection.sendall(_HEALTH)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses a process listens on, as far as this process may see."""
    inodes = set()
    with contextlib.suppress(OSError):  # not ours to look at
        for path in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed a moment ago
                inodes.add(os.readlink(path))
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "net" / name).read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTENING and f"socket:[{columns[9]}]" in inodes:
                    yield _address(columns[1], family)


def _address(text: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Parse an address of /proc, in words of the machine's byte order: 0100007F:1F90 is 127.0.0.1:8080."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(host), 8)]
    quantized = b"".join(words)
    if not any(quantized):  # any address
        quantized = socket.inet_pton(family, "127.0.0.1" if family == socket.AF_INET else "::1")
    return socket.inet_ntop(family, quantized), int(port, 16)
