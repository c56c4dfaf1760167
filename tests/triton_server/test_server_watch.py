"""How the model's process finds the ports of its server. That it notices a stop is tested with the real server."""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.servers.triton import server_watch
from dflash_trt.servers.triton.server_watch import ServerWatch, _address, _listening, _num_wakes, stop_server


@pytest.mark.parametrize(
    ("text", "family", "expected"),
    [
        ("0100007F:1F90", socket.AF_INET, ("127.0.0.1", 8080)),
        ("00000000:1F40", socket.AF_INET, ("127.0.0.1", 8000)),
        ("00000000000000000000000001000000:1F90", socket.AF_INET6, ("::1", 8080)),
        ("00000000000000000000000000000000:1F90", socket.AF_INET6, ("::1", 8080)),
    ],
)
def test_an_address_of_proc_is_where_to_connect(text, family, expected) -> None:
    assert _address(text, family) == expected


def test_a_listening_socket_is_found_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert address in list(_listening(os.getpid()))
    assert address not in list(_listening(os.getpid()))


def test_a_server_that_sleeps_is_not_stopping_and_is_never_asked() -> None:
    def ask() -> bool:
        raise AssertionError("asked without a suspicion")

    watch = ServerWatch(ask)
    watch._pid = os.getpid()
    wakes = _num_wakes(os.getpid())
    assert wakes > 0
    watch._wakes.append((float("inf"), wakes + 1000))  # no more wakes than before
    assert not watch.is_stopping()


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_server_that_wakes_is_asked(is_ready) -> None:
    watch = ServerWatch(lambda: is_ready)
    watch._pid = os.getpid()
    watch._wakes.append((float("inf"), _num_wakes(os.getpid()) - 1000))
    assert watch.is_stopping() is not is_ready
    assert not ServerWatch(lambda: True).is_gone()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ready server whose clock, wakes and answers a test sets; it listens at ports 1, 2 and 3, and 3 is no HTTP."""
    server: Any = type("Server", (), {"now": 100.0, "wakes": 0, "answers": {1, 2}})()
    monkeypatch.setattr(server_watch.time, "monotonic", lambda: server.now)
    monkeypatch.setattr(server_watch, "_num_wakes", lambda pid: server.wakes)
    monkeypatch.setattr(server_watch, "_listening", lambda pid: [("h", port) for port in (1, 2, 3)])
    monkeypatch.setattr(server_watch, "_is_answered", lambda address: address[1] in server.answers)
    server.watch = ServerWatch(lambda: True)
    return server


def test_a_server_that_wakes_and_answers_no_more_is_stopping(watched: Any, caplog: Any) -> None:
    watched.watch.requests_come()
    assert caplog.text == "" and not watched.watch.is_stopping()
    watched.answers = {2}
    for now, wakes, is_stopping in ((101.0, 1, False), (102.0, 2, True), (106.0, 3, False), (106.0, 4, True)):
        watched.now, watched.wakes = now, wakes
        assert watched.watch.is_stopping() == is_stopping, now
    watched.answers = {1, 2}
    assert not watched.watch.is_stopping()
    watched.answers = set()
    watched.watch.requests_come()
    assert "no HTTP port of the server found" in caplog.text
    assert not watched.watch.is_stopping()


@pytest.mark.parametrize(("answer", "is_answered"), [(b"HTTP/1.1 200 OK\r\n\r\n", True), (b"HTTP/1.1 400 No", False)])
def test_a_port_answers_when_it_says_that_all_is_well(answer: bytes, is_answered: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1000).startswith(b"GET /v2/health/live ")
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert server_watch._is_answered(address) == is_answered
        thread.join(10)
    assert not server_watch._is_answered(address)


@pytest.mark.parametrize(("name", "stops"), [("tritonserver", True), ("python", False), (None, False)])
def test_only_a_server_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, stops: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(server_watch, "_PROC", tmp_path)
    monkeypatch.setattr(os, "kill", lambda *words: asked.append(words))
    if name is not None:
        (tmp_path / str(os.getppid())).mkdir()
        (tmp_path / str(os.getppid()) / "comm").write_text(f"{name}\n")
    assert stop_server() == stops
    assert asked == [(os.getppid(), signal.SIGTERM)] * stops


def test_an_orphan_knows_that_its_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ServerWatch(lambda: True)
    assert not watch.is_gone()
    another = os.getppid() + 1  # tests may be orphans themselves
    monkeypatch.setattr(os, "getppid", lambda: another)
    assert watch.is_gone()
