"""The processes of a service: what each is started with, and what becomes of those that die. None is started here."""

import dataclasses
import importlib.util
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'serve'")

from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.servers.dynamo import contract, event_broker
from dflash_trt.servers.dynamo import supervisor as module
from dflash_trt.servers.dynamo.environment import LOOPBACK, forget_worker, is_registered, local_environment
from dflash_trt.servers.dynamo.settings import (
    GatewaySettings,
    PageSettings,
    PromptLimits,
    WorkerSettings,
    card_source,
    check_package,
)
from dflash_trt.servers.dynamo.supervisor import Service, ServiceError, Supervisor, visible_gpus

WORKER = WorkerSettings(engine_dir=Path("engine"), runtime=RuntimeConfig(seed=3), model_name="m", namespace="n")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: list[str]) -> Any:
    prompts = SimpleNamespace(max_text_bytes=1234)
    sizes = {"build_config": SimpleNamespace(max_seq_len=64), "target": SimpleNamespace(vocab_size=99)}
    engine = SimpleNamespace(manifest=SimpleNamespace(**sizes))
    monkeypatch.setattr(module.EngineDir, "open", lambda path: engine)
    monkeypatch.setattr(module, "open_request_reader", lambda engine: SimpleNamespace(prompts=prompts))
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(**fields: Any) -> Supervisor:
        supervisor = Supervisor(Service(**({"worker": WORKER} | fields)), log.append)
        supervisor._state = tmp_path
        return supervisor

    return make


def test_each_worker_has_its_port_its_gpus_and_its_share_of_the_cores(make: Any, tmp_path: Path, monkeypatch) -> None:
    service = make(num_replicas=3, gpus=((0, 1), (2, 3), (4, 5)), first_metrics_port=9001, log_file=Path("log"))
    workers = [service._worker(index) for index in range(3)]
    for index, worker in enumerate(workers):
        assert worker.environment["DYN_SYSTEM_PORT"] == str(9001 + index)
        assert worker.environment["CUDA_VISIBLE_DEVICES"] == f"{2 * index},{2 * index + 1}"
        assert worker.environment["OMP_NUM_THREADS"] == "2"
        assert worker.environment["DYN_FILE_KV"] == str(tmp_path / "registrations")
        assert worker.id_file == worker.task.id_file
        expected = {"id_file": worker.id_file, "card": tmp_path / "card"}
        assert (worker.name, worker.task) == (f"replica {index}", WORKER.model_copy(update=expected))
        assert worker.log_file == Path("log")
    assert len({worker.id_file for worker in workers}) == 3
    assert make(num_replicas=9)._worker(0).environment["OMP_NUM_THREADS"] == "1"
    beside = make(num_replicas=1, baseline="w-no-drafter")
    assert [beside._worker(index).environment["OMP_NUM_THREADS"] for index in range(2)] == ["4", "4"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    own = make()._worker(0).environment
    assert own["OMP_NUM_THREADS"] == "5" and "CUDA_VISIBLE_DEVICES" not in own


def test_the_first_workers_compute_prompts_for_the_others(make: Any, tmp_path: Path) -> None:
    service = make(num_replicas=3, num_prefill_workers=2)
    tasks = [service._worker(index).task for index in range(3)]
    assert [task.role for task in tasks] == ["prefill", "prefill", "decode"]
    assert {task.runtime.disk_cache_dir for task in tasks} == {str(tmp_path / "prefixes")}
    named = WORKER.model_copy(update={"runtime": RuntimeConfig(disk_cache_dir="/shared")})
    assert make(num_prefill_workers=1, worker=named)._worker(0).task.runtime.disk_cache_dir == "/shared"
    assert make(worker=named)._worker(0).task.role == "both"


def test_the_last_worker_is_the_model_without_its_drafter(make: Any) -> None:
    service = make(num_replicas=1, baseline="m-no-drafter", gpus=((0,), (1,)))
    drafting, plain = (service._worker(index) for index in range(2))
    assert (drafting.task.model_name, drafting.task.component) == (WORKER.model_name, "backend")
    assert drafting.task.runtime.use_drafter and not plain.task.runtime.use_drafter
    assert (plain.name, plain.task.model_name, plain.task.component) == ("baseline replica", "m-no-drafter", "baseline")
    assert plain.environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_gateway_stands_before_the_front_end_which_is_on_loopback(make: Any, tmp_path: Path) -> None:
    page = PageSettings(model="m", has_chat_template=True, is_chat_model=True, has_drafter=True, reports_drafts=True)
    service = make(host="0.0.0.0", port=8123, frontend_arguments=("--router-mode", "kv"), page=page)
    assert service._gateway().task == GatewaySettings(
        host="0.0.0.0",
        port=8123,
        frontend_url=f"http://{LOOPBACK}:{service._frontend_port}",
        prompts=PromptLimits(max_tokens=63, max_text_bytes=1234, vocab_size=99),
        has_tool_call_parser=False,
        page=page,
    )
    front_end = service._frontend()
    words = list(front_end.task)
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options == {
        "--http-host": LOOPBACK,
        "--http-port": str(service._frontend_port),
        "--namespace": "n",
        "--discovery-backend": "file",
        "--request-plane": "tcp",
        "--event-plane": "zmq",
        "--router-mode": "kv",
    }
    assert front_end.environment["HOME"] == str(tmp_path / "home")
    assert (service._gateway().id_file, front_end.id_file) == (None, None)
    worker = WORKER.model_copy(update={"tool_call_parser": "hermes"})
    service._service = dataclasses.replace(service._service, worker=worker)
    assert service._gateway().task.has_tool_call_parser


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:8000"), ("10.0.0.7", "http://10.0.0.7:8000")])
def test_a_service_is_asked_where_it_listens(host: str, url: str) -> None:
    assert Service(worker=WORKER, host=host).url == url


class Process:
    """`code` is that of a process that has ended."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.num_kills = 0
        self.stdin = io.BytesIO()

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.num_kills += 1

    def wait(self, timeout_s: float | None = None) -> None: ...


def registered(state: Path, *kinds: str, instance_id: str = "ab") -> None:
    for kind in kinds:
        (state / "registrations" / kind).mkdir(parents=True, exist_ok=True)
        (state / "registrations" / kind / f"n-{instance_id}").touch()


def test_a_worker_that_lost_its_registration_is_killed_once_it_has_lasted(make: Any, tmp_path: Path, log) -> None:
    service = make()
    worker = service._worker(0)
    worker.process = process = Process()
    service._check_registration(worker, 10.0)  # it starts: nothing is amiss
    service._check_registration(worker, 100.0)
    assert worker.unregistered_since_s is None and not worker.has_served
    worker.id_file.write_text("ab")
    registered(tmp_path, "instances", "mdc")
    service._check_registration(worker, 100.0)
    assert worker.has_served
    (tmp_path / "registrations" / "mdc" / "n-ab").unlink()
    service._check_registration(worker, 101.0)
    registered(tmp_path, "mdc")  # it was a moment only
    service._check_registration(worker, 103.0)
    (tmp_path / "registrations" / "instances" / "n-ab").unlink()
    for now, num_kills in ((104.0, 0), (107.0, 0), (107.5, 1), (109.0, 1), (111.0, 2)):
        service._check_registration(worker, now)
        assert process.num_kills == num_kills, now
    assert "replica 0 has lost its registration" in log[0]


def test_a_process_that_died_is_forgotten_and_started_again_after_its_pause(make: Any, tmp_path, monkeypatch) -> None:
    now = 100.0
    service, started = make(), list[str]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module._Child, "start", lambda child: started.append(child.name))
    worker, *doors = service._worker(0), service._gateway(), service._frontend()
    service._workers, service._doors, service._is_up = [worker], doors, True
    monkeypatch.setattr(module, "_get", lambda url: {"data": []} if str(service._frontend_port) in url else {})
    for each in service._children:
        each.process = Process()
    worker.id_file.write_text("ab")
    registered(tmp_path, "instances", "mdc")
    service.check()
    assert [each.has_served for each in service._children] == [True, False, True]
    worker.process.code = doors[0].process.code = -9
    pipe = worker.process.stdin
    service.check()
    assert pipe.closed
    assert not is_registered(tmp_path, "ab") and (worker.due_s, doors[0].due_s) == (100.0, 101.0)
    service.check()
    assert started == ["replica 0"]
    worker.process = Process()
    now = 100.9
    service.check()
    now = 101.0
    service.check()
    assert started == ["replica 0", "gateway"]


def test_a_process_starts_without_what_was_known_of_the_one_before(make: Any, tmp_path: Path, monkeypatch) -> None:
    made: list[Any] = []
    process = Process()
    monkeypatch.setattr(module.subprocess, "Popen", lambda words, **options: made.append((words, options)) or process)
    worker = make(log_file=tmp_path / "log")._worker(0)
    worker.id_file.write_text("ab")
    worker.has_served, worker.unregistered_since_s = True, 5.0
    worker.start()
    assert (worker.has_served, worker.unregistered_since_s, worker.instance_id) == (False, None, None)
    ((words, options),) = made
    assert words[1:] == ["-m", "dflash_trt.servers.dynamo.child"]
    assert (options["env"], options["start_new_session"]) == (worker.environment, True)
    assert worker.process is process and pickle.loads(process.stdin.getvalue()) == worker.task


POLITE = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(7)))"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_processes_are_asked_to_end_together_and_killed_when_they_do_not(make: Any, log, monkeypatch) -> None:
    monkeypatch.setattr(module, "_KILL_AFTER_S", 3.0)
    service = make(num_replicas=3)
    service._workers = [service._worker(index) for index in range(3)]  # the last one waits for its next start
    started = []
    for worker, handler in zip(service._workers, (DEAF, POLITE), strict=False):
        words = f"import signal, sys, time\n{handler}\nprint('ready', flush=True)\nwhile True: time.sleep(60)"
        pipe = subprocess.PIPE
        worker.process = subprocess.Popen([sys.executable, "-c", words], stdin=pipe, stdout=pipe)
        started.append(worker.process)
    for process in started:
        with process.stdout as lines:
            assert lines.readline() == b"ready\n"
    stopping = threading.Thread(target=service._stop)
    stopping.start()
    stopping.join(30)
    try:
        assert not stopping.is_alive()
        assert [process.poll() for process in started] == [-signal.SIGKILL, 7]
        assert log == ["replica 0 did not stop: killed"]
        assert all(process.stdin.closed for process in started)
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize("fails", [False, True])
def test_the_processes_of_a_service_end_with_its_block(make: Any, tmp_path: Path, monkeypatch, fails: bool) -> None:
    """Also those that were started before one that cannot be."""
    processes: list[Any] = []

    class Ending(Process):
        def terminate(self) -> None:
            self.code = -15

    def start(child: Any) -> None:
        if fails and child.name == "front end":
            raise OSError("no memory")
        child.process = Ending()
        processes.append(child.process)

    monkeypatch.setattr(module, "state_directory", lambda: nullcontext(tmp_path))
    monkeypatch.setattr(module, "write_card", lambda engine, card: (card / "written").touch())
    monkeypatch.setattr(event_broker, "EventBroker", lambda *addresses: nullcontext())
    monkeypatch.setattr(module._Child, "start", start)
    with suppress(OSError), make(num_replicas=2) as service:
        assert not fails and (tmp_path / "card" / "written").is_file()
        assert [child.name for child in service._children] == ["replica 0", "replica 1", "gateway", "front end"]
        assert [process.code for process in processes] == [None] * 4
    assert [process.code for process in processes] == [-15] * (3 if fails else 4)


@pytest.mark.parametrize("has_served", [False, True])
def test_pauses_grow_with_each_start_that_fails_in_a_row(make: Any, monkeypatch, log, has_served: bool) -> None:
    service = make()
    service._is_up = True
    worker = service._worker(0)
    pauses = []
    for _ in range(4):
        worker.has_served = has_served
        service._lost(worker, 3, 100.0)
        pauses.append(worker.due_s - 100.0)
    assert pauses == ([0.0] * 4 if has_served else [1.0, 3.0, 7.0, 15.0])
    assert log[-1] == f"replica 0 ended with exit code 3: its requests failed; it starts again in {pauses[-1]:.0f} s"
    worker.has_served = False
    if has_served:
        service._lost(worker, 3, 100.0)
        return
    with pytest.raises(ServiceError, match="the 5th time in a row without serving"):
        service._lost(worker, -9, 100.0)


def test_before_a_service_is_up_a_process_that_dies_ends_it(make: Any) -> None:
    for log_file, place in ((None, "above"), (Path("the.log"), "in the.log")):
        service = make(log_file=log_file)
        with pytest.raises(ServiceError, match=f"replica 0 ended with exit code 3 .* its messages stand {place}"):
            service._lost(service._worker(0), 3, 100.0)


def test_a_service_is_ready_when_the_front_end_knows_every_worker_and_the_model(make: Any, monkeypatch) -> None:
    service = make(num_replicas=2)
    service._workers = [service._worker(index) for index in range(2)]
    known: dict[str, Any] = {"health": {}, "models": {"data": [{"id": "other"}]}}
    monkeypatch.setattr(module, "_get", lambda url: known[url.rpartition("/")[2]])
    service._workers[0].id_file.write_text("ab")
    assert not service._is_ready()
    service._workers[1].id_file.write_text("cd")
    known["health"] = {"instances": [{"instance_id": 0xAB}]}
    known["models"]["data"].append({"id": "m"})
    assert not service._is_ready()
    known["health"]["instances"].append({"instance_id": 0xCD})
    assert service._is_ready()
    service.wait_until_ready()
    service._lost(service._workers[0], 3, 100.0)  # from now on it is started again
    known["models"]["data"].pop()
    assert not service._is_ready()


def test_a_worker_serves_while_both_its_instance_and_its_model_are_registered(tmp_path: Path) -> None:
    registered(tmp_path, "instances")
    assert not is_registered(tmp_path, "ab")
    registered(tmp_path, "mdc")
    registered(tmp_path, "instances", "mdc", instance_id="cd")
    assert is_registered(tmp_path, "ab") and not is_registered(tmp_path, "ef")
    forget_worker(tmp_path, "ab")
    assert not is_registered(tmp_path, "ab") and is_registered(tmp_path, "cd")


def test_what_the_user_has_set_stays_but_for_the_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = local_environment(tmp_path, base={})
    addresses = {name: value for name, value in ours.items() if name.endswith("_HOST")}
    assert len(addresses) == 4 and set(addresses.values()) == {LOOPBACK}
    assert ours["TMPDIR"] == str(tmp_path)
    assert ours["DYN_ZMQ_BROKER_URL"] == f"xsub=ipc://{tmp_path}/events-in , xpub=ipc://{tmp_path}/events-out"
    peek_ms, grace_s, stop_s = (
        int(ours[f"DYN_{name}"])
        for name in (
            "HTTP_PRE_COMMIT_ERROR_PEEK_MS",
            "GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
            "HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        )
    )
    assert peek_ms >= 10_000  # a constraint that is refused may take seconds to compile
    assert grace_s + stop_s < module._KILL_AFTER_S  # all end by themselves
    theirs = local_environment(tmp_path, base=dict.fromkeys([*ours, "OTHER"], "theirs"))
    changed = {name for name, value in theirs.items() if value != "theirs"}
    assert changed == {*addresses, "TMPDIR", "DYN_FILE_KV", "DYN_ZMQ_BROKER_URL"}
    assert theirs.keys() == {*ours, "OTHER"}
    monkeypatch.setattr(os, "environ", {"OTHER": "found"})
    assert local_environment(tmp_path) == ours | {"OTHER": "found"}


def test_parsers_are_those_of_dynamo() -> None:
    contract.check_parsers(tool_call_parser=None, reasoning_parser=None)
    contract.check_parsers(tool_call_parser="hermes", reasoning_parser="qwen3")
    with pytest.raises(
        ConfigError, match=r"(?s)--tool-call-parser: .*hermes.*found 'a'.*--reasoning-parser: .*found 'b'"
    ):
        contract.check_parsers(tool_call_parser="a", reasoning_parser="b")


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_package()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("zmq", "aiohttp") else name)
    with pytest.raises(
        ConfigError, match=r"found no zmq, aiohttp. Install them with: pip install 'dflash-trt\[serve\]'"
    ):
        check_package()


def test_a_model_card_needs_a_tokenizer_and_the_targets_config(tmp_path: Path) -> None:
    engine: Any = SimpleNamespace(path=tmp_path, tokenizer_path=None)
    with pytest.raises(EngineDirError, match="expected a tokenizer, to serve text, found none"):
        card_source(engine)
    engine.tokenizer_path = tmp_path
    with pytest.raises(EngineDirError, match=r"expected the target's config\.json"):
        card_source(engine)
    (tmp_path / "config.json").touch()
    assert card_source(engine) == tmp_path


def test_gpus_are_counted_among_the_visible_ones() -> None:
    assert visible_gpus((1, 0), {}) == ["1", "0"]
    assert visible_gpus((1, 0), {"CUDA_VISIBLE_DEVICES": "4,GPU-x"}) == ["GPU-x", "4"]
    with pytest.raises(ConfigError, match=r"--gpus: expected indices below 2.*found 2"):
        visible_gpus((0, 2), {"CUDA_VISIBLE_DEVICES": "4,GPU-x"})
