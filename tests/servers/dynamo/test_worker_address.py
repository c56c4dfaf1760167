"""Which address a worker listens at, and who is refused one. What sockets there are is tested in test_nodes.py."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.dynamo import contract
from dflash_trt.servers.dynamo.environment import ADDRESSES
from dflash_trt.servers.dynamo.settings import WorkerSettings
from dflash_trt.servers.dynamo.worker_address import host_of_worker, notices, own_address, worker_environment

BROKER = {"DYN_ZMQ_BROKER_URL": "xsub=ipc:///in , xpub=ipc:///out"}


def settings(name: str | None, backend: Any, plane: Any) -> WorkerSettings:
    return WorkerSettings(engine_dir=Path("e"), model_name="m", host=name, discovery_backend=backend, event_plane=plane)


def host(name: str | None, backend: str = "etcd", plane: str = "nats", **environment: str) -> str | None:
    return host_of_worker(settings(name, backend, plane), environment)


def test_the_option_is_before_the_variable_and_that_before_loopback() -> None:
    assert host("127.0.0.1", DYN_TCP_RPC_HOST="127.0.0.2") == "127.0.0.1"
    assert host(None, DYN_TCP_RPC_HOST="127.0.0.2") == "127.0.0.2"
    assert host(None, backend="file") == "127.0.0.1"
    assert host(None, backend="kubernetes", plane="zmq", DYN_TCP_RPC_HOST="10.9.8.7") is None, "the pod's"


def test_a_worker_of_etcd_is_told_its_address() -> None:
    with pytest.raises(ConfigError, match=r"--discovery-backend etcd: expected --host as well, found none\. Pass"):
        host(None)


@pytest.mark.parametrize("name", ["0.0.0.0", "203.0.113.7", "::1", "node-a"])
def test_the_address_is_one_of_this_machine(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--host: expected an IPv4 address of this machine, other than 0\.0\.0\.0"):
        host(name)


def test_on_loopback_events_need_a_transport_that_stays_there() -> None:
    for backend in ("etcd", "file"):
        with pytest.raises(ConfigError, match=r"publishers would listen on every interface\. Pass --event-plane nats"):
            host("127.0.0.1", backend=backend, plane="zmq")
        assert host("127.0.0.1", backend=backend, plane="zmq", **BROKER) == "127.0.0.1"


def test_a_user_is_told_who_reaches_a_worker_and_what_else_listens() -> None:
    def told(name: str | None, backend: str, plane: str, **environment: str) -> list[str]:
        return notices(settings(name, backend, plane), environment)

    assert told("127.0.0.1", "etcd", "nats") == [
        "--host 127.0.0.1: only a front end on this machine reaches this worker"
    ]
    assert [line.partition(":")[0] for line in told("10.0.0.2", "etcd", "zmq")] == ["--event-plane zmq"]
    assert not told("10.0.0.2", "etcd", "nats") and not told("10.0.0.2", "etcd", "zmq", **BROKER)
    assert not told("127.0.0.1", "file", "nats") and not told(None, "kubernetes", "zmq")


def test_all_sockets_are_there_but_those_that_the_user_has_placed() -> None:
    made = worker_environment("10.0.0.2", {"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "x", "OTHER": "kept"})
    assert {name: made[name] for name in ADDRESSES} == dict.fromkeys(ADDRESSES, "10.0.0.2") | {
        "DYN_SYSTEM_HOST": "127.0.0.1"
    }
    assert made["OTHER"] == "kept" and made["DYN_SYSTEM_PORT"] == "0"
    assert made["DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"] == "30"
    theirs = dict.fromkeys(made, "theirs")
    assert worker_environment("10.0.0.2", theirs) == theirs | {"DYN_TCP_RPC_HOST": "10.0.0.2"}


@pytest.fixture
def environment_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """A worker's, when it opens its engine: of these settings, and of variables that were there."""

    class OpenedError(Exception):
        pass

    def opened(path: Any) -> None:
        raise OpenedError

    def run(given: dict[str, str], **settings: Any) -> dict[str, str]:
        environment = dict(given)
        monkeypatch.setattr(contract.os, "environ", environment)
        monkeypatch.setattr(contract.EngineDir, "open", opened)
        with pytest.raises(OpenedError):
            contract.run_worker(WorkerSettings(engine_dir=Path("e"), model_name="m", **settings))
        return environment

    return run


@pytest.mark.parametrize("name", ["10.0.0.2", None])
def test_the_worker_gives_them_to_dynamo(name: str | None, environment_of: Callable[..., dict[str, str]]) -> None:
    given = {"OTHER": "kept"}
    assert environment_of(given, host=name) == (given if name is None else worker_environment(name, given))


def test_nixl_listens_on_loopback_alone_for_a_worker_there(environment_of: Callable[..., dict[str, str]]) -> None:
    """Unless the user's variable says otherwise."""
    networks = {}
    for host in ("127.0.0.1", "10.0.0.2"):
        for given in ("", "eth1"):
            variables = {"UCX_NET_DEVICES": given} if given else {}
            found = environment_of(variables, host=host, transfer_backend="nixl")
            networks[host, given] = found.get("UCX_NET_DEVICES")
    assert networks == {
        ("127.0.0.1", ""): "lo",
        ("127.0.0.1", "eth1"): "eth1",
        ("10.0.0.2", ""): None,
        ("10.0.0.2", "eth1"): "eth1",
    }
    spoken_for = {"DYN_TCP_RPC_HOST": "127.0.0.1"}
    assert environment_of(spoken_for, transfer_backend="nixl")["UCX_NET_DEVICES"] == "lo"


def test_prefill_workers_listen_where_the_front_end_reaches_them(monkeypatch) -> None:
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "10.0.0.7")
    assert own_address() == "10.0.0.7"
    monkeypatch.delenv("DYN_TCP_RPC_HOST")
    monkeypatch.setattr(socket, "gethostname", lambda: "pod")
    monkeypatch.setattr(socket, "gethostbyname", {"pod": "10.0.0.8"}.__getitem__)
    assert own_address() == "10.0.0.8"

    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert own_address() == "127.0.0.1"
