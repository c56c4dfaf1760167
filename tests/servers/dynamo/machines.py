"""A deployment over several machines by the commands of docs/scaling.md: etcd, front ends, restarted workers."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.docs.pages import Page
from tests.namespaces import Node, network
from tests.servers.dynamo.serving import own_home

LEASE_S, STREAM_TIMEOUT_S = 5, 8
START_S = 120.0
_PORTS = ("DYN_SYSTEM_PORT", "DYN_TCP_RPC_PORT")
_LISTEN = "0A"  # in /proc/PID/net/tcp
_SECTION = "## Several machines without Kubernetes\n"
_QUICKER = {"ETCD_LEASE_TTL": str(LEASE_S), "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "3"}


def needed(program: str, package: str) -> str:
    """The path of a server; skips the test without it."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs {program} (Debian's package {package}) in PATH")
    return found


def documented() -> tuple[str, str, str]:
    """The command of etcd, and the units of a front end and of a worker."""
    section = Page.read("docs/scaling.md").text.partition(_SECTION)[2].partition("\n## ")[0]
    etcd, front_end, unit = (text for language, text in Page("section", section).blocks)
    return etcd, front_end, unit


def loop_of(unit: str, *options: str, before: str = "") -> str:
    """A script that does what systemd does with a unit. The last of two equal options or variables counts."""
    settings = [line.partition("=")[::2] for line in unit.replace("\\\n", "").splitlines() if "=" in line]
    values = dict(settings)
    assert values["Restart"] == "always"
    exports = [f"export {shlex.quote(value)}" for name, value in settings if name == "Environment"]
    again = f"[ $? = {values.get('RestartPreventExitStatus', -1)} ] && exit; sleep {values['RestartSec']}"
    return "\n".join([*exports, before, f"while :; do {values['ExecStart']} {shlex.join(options)}; {again}; done"])


def wait_until(condition: Callable[[], Any], timeout_s: float = START_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@dataclass
class Worker:
    """A worker of a machine under a loop that starts it again, as systemd does."""

    node: Node
    loop: subprocess.Popen[bytes]
    log: Path
    metrics_port: int

    def process(self) -> psutil.Process:
        (found,) = [child for child in psutil.Process(self.loop.pid).children() if child.name() != "sleep"]
        return found

    def kill(self) -> None:
        self.process().send_signal(signal.SIGKILL)

    def metric(self, name: str) -> float:
        text = httpx.get(f"http://{self.node.address}:{self.metrics_port}/metrics", timeout=10).text
        (line,) = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return float(line.rpartition(" ")[2])

    def listening(self) -> set[str]:
        """Addresses of its sockets on its machine, which psutil does not see."""
        process = Path("/proc", str(self.process().pid))
        own = {entry.readlink().name for entry in (process / "fd").iterdir()}
        rows = [line.split() for line in (process / "net/tcp").read_text().splitlines()[1:]]
        packed = [row[1].partition(":")[0] for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in own]
        return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in packed}


@dataclass(frozen=True)
class FrontEnd:
    url: str
    namespace: str

    def instances(self) -> dict[int, str]:
        """Addresses of the workers of its namespace; it tells those of all."""
        with suppress(httpx.TransportError):
            known = httpx.get(f"{self.url}/health", timeout=10).json().get("instances", [])
            return {
                entry["instance_id"]: entry["transport"]["tcp"].partition(":")[0]
                for entry in known
                if (entry["namespace"], entry["endpoint"]) == (self.namespace, "generate")
            }
        return {}

    def is_serving(self, addresses: set[str]) -> bool:
        """True if workers at these addresses, and no others, are known, and so is their model."""
        if set(self.instances().values()) != addresses:
            return False
        return bool(httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"])

    def ask(self, prompt: Any, answer: "Answer | None" = None, **fields: Any) -> "Answer":
        """Fills `answer` while its stream runs."""
        answer = answer or Answer()
        body = {"model": "demo", "prompt": prompt, "nvext": {"extra_fields": ["worker_id"]}} | fields
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=START_S) as reply:
            if reply.status_code != 200 or not fields.get("stream"):
                answer.add(json.loads(reply.read()) | {"status": reply.status_code})
                return answer
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    answer.add(json.loads(line.removeprefix("data: ")))
        return answer


@dataclass
class Answer:
    """`worker` is the one that has answered, or begun to."""

    text: str = ""
    worker: int | None = None
    num_cached: int | None = None
    error: Any = None

    def add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk or chunk.get("status", 200) != 200:
            self.error = chunk
            return
        self.text += "".join(choice["text"] for choice in chunk["choices"])
        found = (chunk.get("nvext") or {}).get("worker_id") or {}
        self.worker = self.worker or found.get("decode_worker_id")
        if chunk.get("usage"):
            self.num_cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass
class Cluster:
    """The first machine has etcd and front ends."""

    engine: Path
    directory: Path
    head: Node
    nodes: list[Node]
    stack: ExitStack
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        etcd = documented()[0].replace("etcd ", f"{needed('etcd', 'etcd-server')} ", 1)
        self.environment = os.environ | _QUICKER | own_home(self.directory)
        self.start(self.head, "etcd", etcd)
        wait_until(lambda: self.answers(f"http://{self.head.address}:2379/health"))

    def start(
        self, node: Node, name: str, script: str, environment: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """A script of the page as a process group of a machine, until the cluster ends."""
        names = {
            "10.0.0.1": self.head.address,
            "10.0.0.2": node.address,
            "/engines/gpt-oss-120b": str(self.engine),
            "/opt/dflash-trt/bin/python": sys.executable,
            "/opt/dflash-trt/bin/dflash-trt": f"{sys.executable} -m dflash_trt.cli.main",
            "/var/lib/etcd": str(self.directory),
        }
        for old, new in names.items():
            script = script.replace(old, new)
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                node.command(["bash", "-c", script]),
                env=self.environment | dict(environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stack.callback(_end, process)
        return process, log

    def worker(
        self, node: Node, *options: str, environment: Mapping[str, str] | None = None, port: int = 9100
    ) -> Worker:
        """By the page's unit; port 0 stands for free ones."""
        ports = f"export DYN_SYSTEM_PORT={port} DYN_TCP_RPC_PORT={port + 1}" if port else f"unset {' '.join(_PORTS)}"
        options = ("--model-name", "demo", "--num-threads", "1", "--draft-length", "7", *options)
        script = loop_of(documented()[2], *options, before=ports)
        process, log = self.start(node, f"worker-{node.name}-{port}", script, environment)
        return Worker(node, process, log, port)

    def front_end(
        self, port: int, *options: str, namespace: str = "production", environment: Mapping[str, str] | None = None
    ) -> FrontEnd:
        """By the page's unit, where the engine's files cannot be seen."""
        options = ("--http-port", str(port), "--namespace", namespace, *options)
        before = f"mount -t tmpfs none {self.engine}; export DYN_TCP_RESPONSE_STREAM_PORT={port + 1000}"
        before += f" DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS={STREAM_TIMEOUT_S}"
        script = loop_of(documented()[1], *options, before=before)
        self.start(self.head, f"front-end-{port}", script, environment)
        return FrontEnd(f"http://{self.head.address}:{port}", namespace)

    @staticmethod
    def answers(url: str) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(url, timeout=10).status_code == 200
        return False


@contextmanager
def cluster(engine: Path, directory: Path, num_nodes: int = 2) -> Iterator[Cluster]:
    needed("etcd", "etcd-server")
    with network(num_nodes + 1) as ([head, *nodes], _), ExitStack() as stack:
        yield Cluster(engine, directory, head, nodes, stack)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: a loop would start its worker again."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
