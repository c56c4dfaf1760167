"""A tritonserver of our own on free loopback ports, for the demo and the tests; leaves nothing behind when it ends.

Knows the installation that scripts/install_triton_server makes. A production server is started by its own means, with
the same `server_options`.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.servers.triton.command_line import LOOPBACK, server_options

HOST = LOOPBACK
_SHARED_MEMORY = Path("/dev/shm")
_POLL_S = 0.05
_NUM_TRIES = 3  # another process may take a port that was free a moment ago
_KILL_AFTER_S = 5.0  # beyond the server's own exit timeout
_ERROR = re.compile(r"E\d{4} |error:")
_NUM_LAST_LINES = 20


class ServerError(DFlashError):
    """The server did not start, or died."""


class ServerProcess:
    """Start it with `with`. `log` is the file that its output goes to.

    Everything it starts is in its process group, and its shared memory has a name of its own, so that nothing is
    left even when it has to be killed.
    """

    def __init__(
        self,
        repository: Path,
        installation: Path,
        log: Path,
        *,
        options: Sequence[str] = (),
        exit_timeout_s: int = 10,
        start_timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.region = f"dflash_trt_{os.getpid()}_{secrets.token_hex(4)}_"
        self.http_port = self.grpc_port = self.metrics_port = 0
        self._repository = repository
        self._installation = installation
        self._options = list(options)
        self._exit_timeout_s = exit_timeout_s
        self._start_timeout_s = start_timeout_s
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            for is_last in (*([False] * (_NUM_TRIES - 1)), True):
                self._start()
                if self._wait(is_last=is_last):
                    return self
                self.kill()
            raise AssertionError("the last try raises")
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    def metrics(self) -> dict[str, float]:
        """Every series of the metrics port, by its name and labels."""
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ")[::2] for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def is_ready(self) -> bool:
        """The server's own readiness; only an answered request proves more."""
        try:
            with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def members(self) -> list[int]:
        """The living processes of its group: the server, and one per model instance."""
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, _, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid and state != "Z":
                    found.append(int(path.name))
        return found

    def shared_memory(self) -> list[Path]:
        return list(_SHARED_MEMORY.glob(f"{self.region}*")) if _SHARED_MEMORY.is_dir() else []

    def terminate(self) -> None:
        """Ask it to stop, and do not wait."""
        self._popen.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """The exit code; None when it has to be killed first. Afterwards nothing of it is left."""
        try:
            return self._popen.wait(self._exit_timeout_s + _KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def stop(self) -> int | None:
        """Ask it to stop and wait; the exit code, None when it had to be killed."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self.terminate()
        return self.wait()

    def kill(self) -> None:
        """End every process of the group and remove the shared memory; nothing happens the second time."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _KILL_AFTER_S
        while self.members() and time.monotonic() < deadline:  # they are not our children: nobody else waits for them
            time.sleep(_POLL_S)
        for path in self.shared_memory():
            path.unlink(missing_ok=True)

    @property
    def _popen(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was never started"
        return self._process

    def _start(self) -> None:
        binary = self._installation / "wheel" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        if not binary.exists():
            hint = "Run scripts/install_triton_server."
            raise ConfigError.about(str(binary), expected="the server", found="nothing", hint=hint)
        self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)
        command = [
            str(binary),
            *server_options(self._repository),
            f"--backend-directory={self._installation / 'backends'}",
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            "--allow-gpu-metrics=false",
            f"--exit-timeout-secs={self._exit_timeout_s}",
            f"--backend-config=python,shm-region-prefix-name={self.region}",
            *self._options,
        ]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=kept | self._environment,
                start_new_session=True,
            )

    def _wait(self, *, is_last: bool) -> bool:
        """True if it became ready; False for a start worth another try."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self.is_ready():
            has_ended = self._popen.poll() is not None
            if has_ended or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace")
                if has_ended and "Address already in use" in said and not is_last:
                    return False
                reason = f"exit code {self._popen.returncode}" if has_ended else f"no within {self._start_timeout_s} s"
                raise ServerError(f"tritonserver did not become ready ({reason}), {self.log}:\n{_told(said)}")
            time.sleep(_POLL_S)
        return True


def _told(log: str) -> str:
    """The errors in a log, and its end."""
    lines = log.splitlines()
    errors = [line for line in lines if _ERROR.match(line)]
    return "\n".join([*errors, "...", *lines[-_NUM_LAST_LINES:]])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
