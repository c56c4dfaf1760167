"""The supervisor of `dflash-trt serve`: gateway, front end and workers as processes of one machine.

A process that dies is started again, after a pause that grows with each start that fails. One that never serves, or
fails to start several times in a row, ends the service. A worker that has lost its registration is killed, which
starts it again.
"""

import json
import logging
import pickle
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from dflash_trt.core.errors import ConfigError, DFlashError
from dflash_trt.core.host_resources import available_cores
from dflash_trt.engine_dir import EngineDir
from dflash_trt.servers.dynamo.environment import (
    LOOPBACK,
    event_addresses,
    forget_worker,
    is_registered,
    local_environment,
)
from dflash_trt.servers.dynamo.settings import GatewaySettings, PageSettings, PromptLimits, WorkerSettings, write_card
from dflash_trt.servers.dynamo.state_directory import state_directory
from dflash_trt.serving.llm import open_request_reader

_POLL_S = 0.1
_MAX_FAILED_STARTS = 5
_KILL_AFTER_S = 15.0
_MAX_UNREGISTERED_S = 3.0
_HTTP_TIMEOUT_S = 5.0
_LOG = logging.getLogger(__name__)


class ServiceError(DFlashError):
    """A process of the service cannot be kept running."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """Processes to start. Worker i runs on `gpus[i]`, if any; its metrics are on `first_metrics_port` + i.

    The first `num_prefill_workers` of the replicas compute prompts for the others, in a directory of the service if
    `worker` names none. With `baseline`, a worker after the replicas serves the model without the drafter under this
    name. The processes write to `log_file`, by default to standard error.
    """

    worker: WorkerSettings
    num_replicas: int = 1
    num_prefill_workers: int = 0
    baseline: str | None = None
    gpus: tuple[tuple[int, ...], ...] = ()
    host: str = LOOPBACK
    port: int = 8000
    first_metrics_port: int = 8001
    frontend_arguments: tuple[str, ...] = ()
    page: PageSettings | None = None
    log_file: Path | None = None

    @property
    def num_workers(self) -> int:
        return self.num_replicas + (self.baseline is not None)

    def metrics_port(self, index: int) -> int:
        return self.first_metrics_port + index

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK if self.host == '0.0.0.0' else self.host}:{self.port}"


@dataclass
class _Child:
    """A process, and how often it failed in a row."""

    name: str
    task: Any
    environment: dict[str, str]
    id_file: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    has_served: bool = False
    unregistered_since_s: float | None = None
    num_failures: int = 0
    due_s: float = 0.0
    log: Callable[[str], None] = field(default=_LOG.warning, repr=False)
    log_file: Path | None = None

    def start(self) -> None:
        if self.id_file is not None:
            self.id_file.unlink(missing_ok=True)
        self.has_served, self.unregistered_since_s = False, None
        with nullcontext(sys.stderr) if self.log_file is None else self.log_file.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dflash_trt.servers.dynamo.child"],
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=output.fileno(),
                stderr=output.fileno(),
                start_new_session=True,  # the supervisor decides about Ctrl-C
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(pickle.dumps(self.task))
            self.process.stdin.flush()

    @property
    def instance_id(self) -> str | None:
        """Instance id of a worker that serves; None before it registers."""
        if self.id_file is None or not self.id_file.is_file():
            return None
        return self.id_file.read_text() or None

    def ended(self) -> int | None:
        """The exit code of a process that has just died."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def wait(self, deadline_s: float) -> None:
        if self.process is None:
            return
        try:
            self.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.log(f"{self.name} did not stop: killed")
            self.process.kill()
            self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


class Supervisor:
    """A context manager that starts the processes and ends them all with its block. `log` gets its events."""

    def __init__(self, service: Service, log: Callable[[str], None]) -> None:
        self._service = service
        self._log = log
        self._make_child = partial(_Child, log=log, log_file=service.log_file)
        self._stack = ExitStack()
        self._workers: list[_Child] = []
        self._doors: list[_Child] = []  # gateway and front end
        self._frontend_port = free_port()
        self._state = Path()
        self._is_up = False  # until then a process that dies ends all

    def __enter__(self) -> Self:
        from dflash_trt.servers.dynamo.event_broker import EventBroker

        with ExitStack() as stack:
            self._state = stack.enter_context(state_directory())
            (self._state / "registrations").mkdir()
            (self._state / "home").mkdir()
            (self._state / "card").mkdir()
            write_card(EngineDir.open(self._service.worker.engine_dir), self._state / "card")
            stack.enter_context(EventBroker(*event_addresses(self._state)))
            stack.callback(self._stop)
            self._workers = [self._worker(index) for index in range(self._service.num_workers)]
            self._doors = [self._gateway(), self._frontend()]
            for child in self._children:
                child.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def _children(self) -> Sequence[_Child]:
        return [*self._workers, *self._doors]

    def wait_until_ready(self) -> None:
        """Wait until the front end knows every worker.

        Raises:
            ServiceError: a process ended.
        """
        while not self._is_ready():
            self.check()
            time.sleep(_POLL_S)
        self._is_up = True

    def watch(self) -> None:
        """Keep the processes running, until a signal.

        Raises:
            ServiceError: one of them cannot be started any more.
        """
        while True:
            self.check()
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Start processes again that have died."""
        now = time.monotonic()
        for child in self._children:
            if child.process is None:
                if now >= child.due_s:
                    child.start()
                continue
            code = child.ended()
            if code is not None:
                self._lost(child, code, now)
            elif child.id_file is not None:
                self._check_registration(child, now)
            else:
                child.has_served = child.has_served or self._is_answering(child)

    def _check_registration(self, worker: _Child, now: float) -> None:
        """Kill a worker that has served and that the front end does not know any more, as after a long pause."""
        instance_id = worker.instance_id
        if instance_id is not None and is_registered(self._state, instance_id):
            worker.has_served, worker.unregistered_since_s = True, None
        elif worker.has_served:
            worker.unregistered_since_s = worker.unregistered_since_s or now
            if now - worker.unregistered_since_s > _MAX_UNREGISTERED_S:
                self._log(f"{worker.name} has lost its registration, as after a long pause: killed")
                assert worker.process is not None
                worker.process.kill()
                worker.unregistered_since_s = now  # it takes a moment to end

    def _lost(self, child: _Child, code: int, now: float) -> None:
        instance_id = child.instance_id
        if instance_id is not None:
            forget_worker(self._state, instance_id)
        how = f"{child.name} ended " + (f"by signal {-code}" if code < 0 else f"with exit code {code}")
        if not self._is_up:
            place = "above" if child.log_file is None else f"in {child.log_file}"
            raise ServiceError(f"{how} before the service was up; its messages stand {place}")
        child.num_failures = 0 if child.has_served else child.num_failures + 1
        if child.num_failures == _MAX_FAILED_STARTS:
            raise ServiceError(f"{how}, the {child.num_failures}th time in a row without serving")
        pause_s = 2.0**child.num_failures - 1
        self._log(f"{how}: its requests failed; it starts again in {pause_s:.0f} s")
        child.wait(now)
        child.process, child.due_s = None, now + pause_s

    def _is_ready(self) -> bool:
        ids = {child.instance_id for child in self._workers}
        if None in ids:
            return False
        return {int(str(instance_id), 16) for instance_id in ids} <= self._known_instances() and self._has_model()

    def _is_answering(self, door: _Child) -> bool:
        """True if the front end answers, through the gateway if that is the door."""
        gateway, _ = self._doors
        url = self._service.url if door is gateway else self._frontend_url
        return bool(_get(f"{url}/v1/models"))

    def _known_instances(self) -> set[int]:
        instances = _get(f"{self._frontend_url}/health").get("instances", [])
        return {int(instance["instance_id"]) for instance in instances}

    def _has_model(self) -> bool:
        known = {model["id"] for model in _get(f"{self._service.url}/v1/models").get("data", [])}
        return known >= {self._service.worker.model_name, self._service.baseline} - {None}

    @property
    def _frontend_url(self) -> str:
        return f"http://{LOOPBACK}:{self._frontend_port}"

    def _worker(self, index: int) -> _Child:
        service = self._service
        id_file = self._state / f"replica-{index}"
        environment = local_environment(self._state) | {"DYN_SYSTEM_PORT": str(service.metrics_port(index))}
        threads = max(1, available_cores() // service.num_workers)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        if service.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(service.gpus[index], environment))
        task = self._worker_settings(index).model_copy(update={"id_file": id_file, "card": self._state / "card"})
        name = f"replica {index}" if index < service.num_replicas else "baseline replica"
        return self._make_child(name=name, task=task, environment=environment, id_file=id_file)

    def _worker_settings(self, index: int) -> WorkerSettings:
        worker, num_prefill = self._service.worker, self._service.num_prefill_workers
        if index == self._service.num_replicas:
            plain = {"model_name": self._service.baseline, "component": "baseline"}
            return worker.model_copy(update=plain | {"runtime": worker.runtime.without_drafter()})
        if not num_prefill:
            return worker
        runtime = worker.runtime
        role = "prefill" if index < num_prefill else "decode"
        if worker.transfer_backend == "nixl":
            return worker.model_copy(update={"role": role})
        directory = runtime.disk_cache_dir or str(self._state / "prefixes")
        return worker.model_copy(update={"role": role, "runtime": runtime.replaced(disk_cache_dir=directory)})

    def _gateway(self) -> _Child:
        service = self._service
        engine = EngineDir.open(service.worker.engine_dir)
        max_text_bytes = open_request_reader(engine).prompts.max_text_bytes
        assert max_text_bytes is not None  # the engine has a tokenizer: see card_source
        prompts = PromptLimits(
            max_tokens=engine.manifest.build_config.max_seq_len - 1,
            max_text_bytes=max_text_bytes,
            vocab_size=engine.manifest.target.vocab_size,
        )
        task = GatewaySettings(
            host=service.host,
            port=service.port,
            frontend_url=self._frontend_url,
            prompts=prompts,
            has_tool_call_parser=service.worker.tool_call_parser is not None,
            page=service.page,
        )
        return self._make_child(name="gateway", task=task, environment=local_environment(self._state))

    def _frontend(self) -> _Child:
        worker = self._service.worker
        arguments = ["--http-host", LOOPBACK, "--http-port", str(self._frontend_port)]
        arguments += ["--namespace", worker.namespace, "--discovery-backend", worker.discovery_backend]
        arguments += ["--request-plane", worker.request_plane, "--event-plane", worker.event_plane]
        # Dynamo keeps a cache of model cards in the home directory.
        environment = local_environment(self._state) | {"HOME": str(self._state / "home")}
        task = (*arguments, *self._service.frontend_arguments)
        return self._make_child(name="front end", task=task, environment=environment)

    def _stop(self) -> None:
        for child in self._children:
            child.stop()
        deadline_s = time.monotonic() + _KILL_AFTER_S
        for child in self._children:
            child.wait(deadline_s)


def _get(url: str) -> dict[str, Any]:
    """The answer, an object of JSON; an empty one without it."""
    with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
    return {}


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def visible_gpus(indices: Sequence[int], environment: dict[str, str]) -> list[str]:
    """GPUs by index into CUDA_VISIBLE_DEVICES, if it is set; raises ConfigError for indices beyond it."""
    listed = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not listed:
        return [*map(str, indices)]
    beyond = [index for index in indices if index >= len(listed)]
    if beyond:
        expected = f"indices below {len(listed)}, the number of GPUs in CUDA_VISIBLE_DEVICES"
        raise ConfigError.about("--gpus", expected=expected, found=", ".join(map(str, beyond)))
    return [listed[index] for index in indices]
