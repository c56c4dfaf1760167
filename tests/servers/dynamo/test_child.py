"""The process of a service, `child.py`: its task, its ends and its exit code. Gateways are started; nothing else is."""

import os
import pickle
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra 'serve'")

from dflash_trt.core.errors import ConfigError, EngineDirError
from dflash_trt.servers.dynamo import child, contract, gateway
from dflash_trt.servers.dynamo.environment import LOOPBACK
from dflash_trt.servers.dynamo.settings import GatewaySettings, PromptLimits, WorkerSettings
from dflash_trt.servers.dynamo.supervisor import _Child
from tests.servers.dynamo.serving import free_ports

WORKER = WorkerSettings(engine_dir=Path("engine"), model_name="m")
PROMPTS = PromptLimits(max_tokens=1, max_text_bytes=1, vocab_size=1)


def test_a_process_does_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"prompts": PROMPTS, "has_tool_call_parser": False}
    door = GatewaySettings(host="h", port=1, frontend_url="u", **limits)
    for place, name in ((gateway, "run_gateway"), (contract, "run_worker"), (contract, "run_frontend")):
        monkeypatch.setattr(place, name, lambda task, name=name: (name, task))
    tasks = {"run_gateway": door, "run_worker": WORKER, "run_frontend": ("--http-port", "1")}
    assert {name: child._run(task) for name, task in tasks.items()} == {
        name: (name, task) for name, task in tasks.items()
    }


def test_a_process_ends_when_its_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(child.os, "kill", lambda *words: killed.append(words))
    reading, writing = os.pipe()
    os.write(writing, b"a task")
    os.close(writing)
    child._end_with(reading)
    os.close(reading)
    assert killed == [(os.getpid(), signal.SIGTERM)]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # stdin, which ends with the process
@pytest.mark.parametrize("error", [ConfigError("the reason"), EngineDirError("the reason"), None])
def test_a_process_takes_its_task_from_stdin_and_ends_with_its_code(monkeypatch, capsys, error: Any) -> None:
    killed, done = threading.Event(), list[Any]()

    def run(task: Any) -> int:
        done.append(task)
        assert not killed.is_set()
        os.close(writing)  # its supervisor has gone
        assert killed.wait(30)
        if error is not None:
            raise error
        return 70

    monkeypatch.setattr(child, "_run", run)
    monkeypatch.setattr(child, "let_threads_sleep", lambda: done.append("threads"))  # before PyTorch is imported
    monkeypatch.setattr(child, "raise_file_limit", lambda: done.append("files"))
    monkeypatch.setattr(child.os, "kill", lambda *words: killed.set())
    reading, writing = os.pipe()
    os.write(writing, pickle.dumps(WORKER))
    own = os.dup(0)
    os.dup2(reading, 0)
    try:
        assert child.main() == (70 if error is None else error.exit_code)
    finally:
        os.dup2(own, 0)
        os.close(own)
        os.close(reading)
    assert done == ["threads", "files", WORKER]
    assert capsys.readouterr().err == ("" if error is None else "error: the reason\n")


def is_answered(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((LOOPBACK, port)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_a_gateway_ends_well_with_a_signal_and_with_its_supervisor(tmp_path: Path, number: int | None) -> None:
    port = free_ports(1)
    limits: dict[str, Any] = {"prompts": PROMPTS, "has_tool_call_parser": False}
    task = GatewaySettings(host=LOOPBACK, port=port, frontend_url=f"http://{LOOPBACK}:1", **limits)
    door = _Child(name="gateway", task=task, environment=dict(os.environ), log_file=tmp_path / "log")
    door.start()
    process = door.process
    assert process is not None and process.stdin is not None
    try:
        while not is_answered(port):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        if number is None:
            process.stdin.close()
        else:
            process.send_signal(number)
        assert process.wait(30) == 0
        assert (tmp_path / "log").read_text() == ""
    finally:
        door.wait(0.0)
