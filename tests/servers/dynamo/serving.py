"""`dflash-trt serve` as a child process, and clients of it."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

START_S = 180.0
STOP_S = 30.0


@dataclass
class Server:
    """A running service. `output` is what it printed."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    num_replicas: int
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.log.read_text()

    def client(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.clients.append(client)
        return client

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "demo"} | fields, timeout=120)

    def answers(self) -> int | None:
        """The status of a small request; None without a connection."""
        with contextlib.suppress(httpx.TransportError):
            return self.post("completions", prompt="x", max_tokens=2).status_code
        return None

    def health(self) -> int | None:
        """The status of /health; None without a connection."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health", timeout=20).status_code
        return None

    def metric(self, name: str, replica: int) -> float | None:
        """A metric of one replica; None if it is not there."""
        text = httpx.get(f"http://127.0.0.1:{self.port + 1 + replica}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return float(lines[0].rpartition(" ")[2]) if lines else None

    def total(self, name: str) -> float:
        return sum(self.metric(name, replica) or 0.0 for replica in range(self.num_replicas))

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Processes of replicas: those that serve metrics."""
        ports = {self.port + 1 + replica for replica in range(self.num_replicas)}
        return [process for process in self.processes() if ports & {place.port for place in listening(process)}]

    def wait_until(self, condition: Any, timeout_s: float = START_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM) -> int:
        for client in self.clients:
            client.close()
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def listening(process: psutil.Process) -> list[Any]:
    """Addresses; none of a process that has just ended."""
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [entry.laddr for entry in connections if entry.status == psutil.CONN_LISTEN]


@contextlib.contextmanager
def serving(
    engine: Path, directory: Path, *options: str, num_replicas: int = 2, num_threads: int | None = 1
) -> Iterator[Server]:
    """Files that the service makes are below `directory`."""
    port = free_ports(num_replicas + 2)  # the last for a baseline replica
    log = directory / f"serve-{port}.log"
    words = [sys.executable, "-m", "dflash_trt.cli.main", "serve", str(engine), "--model-name", "demo"]
    words += ["--port", str(port), "--replicas", str(num_replicas), *options]
    words += [] if num_threads is None else ["--num-threads", str(num_threads)]
    environment = os.environ | own_home(directory)
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    server = Server(process, port, log, num_replicas)
    try:
        server.wait_until(lambda: "serving demo" in server.output)
        yield server
    finally:
        if process.poll() is None:
            assert server.stop() == 143


def own_home(directory: Path) -> dict[str, str]:
    """Variables of processes that leave their files in `directory`, and find the CPU kernels that are compiled."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {"HOME": str(directory), "TMPDIR": str(directory), "XDG_CACHE_HOME": cache}


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    for first in random.sample(range(20000, 32000), 100):
        if all(_is_free(first + index) for index in range(count)):
            return first
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
