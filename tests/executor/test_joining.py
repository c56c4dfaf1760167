"""Which ranks node 0 takes: those that know the secret and have its engine, software and nodes."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from dflash_trt.backends.torch import process_group
from dflash_trt.backends.torch.process_group import ProcessRanks, StoreAddress
from dflash_trt.core.errors import ConfigError, RankError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.tcp import LOST_AFTER_S, limit_new_connections
from dflash_trt.executor.ranks import joining, node, nodes
from dflash_trt.executor.ranks.joining import SECRET, Greeting, Peer
from dflash_trt.executor.ranks.messages import Gone, OpenShard, RankGoneError
from dflash_trt.executor.ranks.node import Node
from dflash_trt.executor.ranks.nodes import Nodes, RemoteRank

LOOPBACK = "127.0.0.1"
KEY = "a secret of the tests' own"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY)


def engine_of(num_ranks: int = 4, *, sha256: str = "ab12") -> Any:
    mapping = Mapping(world_size=num_ranks, tp_size=num_ranks)
    manifest = SimpleNamespace(pretrained_config=SimpleNamespace(mapping=mapping))
    return SimpleNamespace(manifest=manifest, path=Path("/engines/of-this-node"), sha256=sha256)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def node_at(port: int, **fields: Any) -> Node:
    given: dict[str, Any] = {"engine": engine_of(), "nnodes": 2, "node_rank": 1}
    return Node(**given | fields, master_addr=LOOPBACK, master_port=port)


class Node0:
    """Node 0, which waits for the others in a thread, and all that join it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.nodes: Nodes
        self._peers: list[Peer] = []
        self._thread: threading.Thread

    def listen(self, *, nnodes: int = 2, waits: bool = True) -> Nodes:
        config = RuntimeConfig(nnodes=nnodes, master_addr=LOOPBACK, master_port=self.port)
        self.nodes = Nodes(engine_of(), config)
        if waits:
            self._thread = threading.Thread(target=self.nodes.wait, daemon=True)
            self._thread.start()
        return self.nodes

    def join(self, *, secret: str = KEY, **fields: Any) -> dict[int, Peer]:
        peers = node_at(self.port, **fields)._join(secret.encode())
        self._peers += peers.values()
        return peers

    def has_all(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.nodes.close()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def node_0() -> Iterator[Node0]:
    made = Node0()
    yield made
    made.close()


def test_the_ranks_of_a_node_join_with_its_directory_and_address(node_0: Node0) -> None:
    made = node_0.listen()
    peers = node_0.join()
    node_0.has_all()
    assert [*peers] == [2, 3] and made.take(1) is None
    order = OpenShard(engine_dir="/engines/of-node-0", rank=3, options=None)  # type: ignore[arg-type]
    remote = made.take(3)
    assert remote is not None
    assert remote.localized(order) == replace(order, engine_dir="/engines/of-this-node", address=LOOPBACK)
    remote.send(order)
    assert peers[3].pipe.recv() == order
    with pytest.raises(OSError, match="refused"):  # nobody can join any more
        socket.create_connection((LOOPBACK, node_0.port))
    made.close()
    remote.end(0.0)
    with pytest.raises(EOFError):
        peers[2].pipe.recv()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"engine": engine_of(sha256="cd34")},
            "engine: expected ab12, as node 0, found cd34. Copy the engine directory of node 0.",
        ),
        ({"nnodes": 4}, "nnodes: expected 2, as node 0, found 4. Pass the same --nnodes on all nodes."),
    ],
)
def test_a_node_that_is_not_as_node_0_is_refused_by_name(node_0: Node0, fields: dict[str, Any], said: str) -> None:
    node_0.listen()
    with pytest.raises(ConfigError, match=said) as refused:
        node_0.join(**fields)
    assert f"node 0 at {LOOPBACK}:{node_0.port} refused rank" in str(refused.value)
    node_0.join()
    node_0.has_all()


def test_other_software_is_refused_by_name(node_0: Node0, monkeypatch: pytest.MonkeyPatch) -> None:
    own = joining.dflash_trt.__version__
    node_0.listen()
    with monkeypatch.context() as patch:
        patch.setattr(joining.dflash_trt, "__version__", "9.9.9")
        said = rf"software: expected dflash-trt {own}, PyTorch .*, as node 0, found dflash-trt 9\.9\.9"
        with pytest.raises(ConfigError, match=said):
            node_0.join()
    node_0.join()
    node_0.has_all()


def test_a_node_rank_that_has_joined_is_refused_and_one_that_has_left_is_replaced(node_0: Node0) -> None:
    node_0.listen(nnodes=4)
    first = node_0.join(nnodes=4)
    with pytest.raises(ConfigError, match="node rank: expected one that has not joined, found 1, again"):
        node_0.join(nnodes=4)
    first[1].close()
    for node_rank in (1, 2, 3):
        node_0.join(nnodes=4, node_rank=node_rank)
    node_0.has_all()


def test_another_secret_is_refused_on_both_sides(node_0: Node0, caplog: pytest.LogCaptureFixture) -> None:
    node_0.listen()
    with pytest.raises(ConfigError, match="expected dflash-trt with the secret of this node, found it has another"):
        node_0.join(secret="another secret than node 0's")
    node_0.join()
    node_0.has_all()
    assert f"refused a connection from {LOOPBACK}: it has another secret" in caplog.text


class Explodes:
    """A pickle that runs a command of the sender."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._path),))


@pytest.mark.parametrize("talk", [b"GET / HTTP/1.1\r\n\r\n", b"", None], ids=["HTTP", "nothing", "a pickle"])
def test_a_peer_without_the_secret_is_never_unpickled_and_does_not_keep_others_out(
    node_0: Node0, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talk: bytes | None
) -> None:
    monkeypatch.setattr(joining, "_READ_TIMEOUT_S", 1)
    content = pickle.dumps(Explodes(tmp_path / "unpickled"))
    framed = 2 * (len(content).to_bytes(4, "big") + content)
    node_0.listen()
    with socket.create_connection((LOOPBACK, node_0.port)) as stranger:
        stranger.sendall(framed if talk is None else talk)
        node_0.join()
        node_0.has_all()
    assert not (tmp_path / "unpickled").exists()


def test_a_greeting_is_never_unpickled(tmp_path: Path) -> None:
    """Of a peer that knows the secret."""
    ours, theirs = map(Peer, connected())
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(ours.receive_greeting, KEY.encode())
        joining.answer_challenge(theirs.pipe, KEY.encode())
        joining.deliver_challenge(theirs.pipe, KEY.encode())
        theirs.pipe.send(Explodes(tmp_path / "unpickled"))
        with pytest.raises(joining.PeerError):
            received.result(10)
    assert not (tmp_path / "unpickled").exists()
    ours.close()
    theirs.close()


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_nothing_listens_but_on_the_master_address(node_0: Node0) -> None:
    before = listening()
    made = node_0.listen(waits=False)
    assert len(listening() - before) == 2 and {host for host, _ in listening() - before} == {LOOPBACK}
    made.close()
    assert listening() == before


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_nodes_that_do_not_come_are_named_in_time(node_0: Node0, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "JOIN_TIMEOUT_S", 0.2)
    made = node_0.listen(nnodes=4, waits=False)
    said = rf"expected 4 nodes within 0 s, found nobody of node 1, 2, 3\. .*--master-port {node_0.port}"
    with pytest.raises(RankError, match=said):
        made.wait()


def test_a_node_0_that_does_not_come_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "JOIN_TIMEOUT_S", 0.2)
    with pytest.raises(RankError, match=r"node 0 at 127.0.0.1:\d+: expected an answer within 0 s, found .*refused"):
        node_at(free_port()).run()


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_that_is_not_node_0s_is_refused(host: str) -> None:
    config = RuntimeConfig(nnodes=2, master_addr=host)
    with pytest.raises(ConfigError, match=f"--master-addr: expected {host}:29500 to listen on"):
        Nodes(engine_of(), config)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        config = RuntimeConfig(nnodes=2, master_addr=LOOPBACK, master_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            Nodes(engine_of(), config)


@pytest.mark.parametrize("value", ["", "short"])
def test_a_secret_is_needed_on_all_nodes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(SECRET, value)
    config = RuntimeConfig(nnodes=2, master_addr=LOOPBACK)
    for use in (lambda: Nodes(engine_of(), config), node_at(free_port()).run):
        with pytest.raises(ConfigError, match=f"DFLASH_TRT_SECRET: .* found {len(value)} characters"):
            use()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nnodes": 3}, "--nnodes: expected a divisor of 4"),
        ({"nnodes": 8}, "--nnodes: expected a divisor of 4"),
        ({"node_rank": 2}, "--node-rank: expected 1 to 1, found 2"),
    ],
)
def test_ranks_that_do_not_fill_the_nodes_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        node_at(free_port(), **fields).run()


# A rank of another node


@pytest.fixture
def remote() -> Iterator[tuple[RemoteRank, Peer]]:
    """Node 0's end, and the other node's."""
    ours, theirs = map(Peer, connected())
    greeting = Greeting.of(engine_of(), nnodes=2, rank=2, address="10.9.8.7")
    yield RemoteRank(greeting, ours), theirs
    ours.close()
    theirs.close()


def test_why_a_rank_has_ended_is_its_nodes_word(remote: tuple[RemoteRank, Peer]) -> None:
    rank, theirs = remote
    assert not rank.has_ended
    theirs.pipe.send(Gone(3, "its process exited with 3 (node 1)"))
    theirs.close()
    assert rank.has_ended
    rank.wait()
    for _ in range(2):  # whatever is done with it
        with pytest.raises(RankGoneError, match=r"exited with 3 \(node 1\)") as gone:
            rank.receive(1.0)
        assert gone.value.rank == 3, "another one of the node, which ended first"


def test_a_connection_that_is_closed_or_silent_names_the_node(remote: tuple[RemoteRank, Peer]) -> None:
    rank, theirs = remote
    silent = rank._ending(TimeoutError(110, "Connection timed out"))
    assert str(silent) == f"its node 10.9.8.7 has been silent for {LOST_AFTER_S} s"
    theirs.close()
    with pytest.raises(RankGoneError, match=r"its node 10\.9\.8\.7 closed the connection"):
        rank.receive(1.0)


def test_an_order_to_a_rank_that_has_ended_finds_the_word_after_its_reports(remote: tuple[RemoteRank, Peer]) -> None:
    rank, theirs = remote
    theirs.pipe.send("a report that nobody has read")
    theirs.pipe.send(Gone(2, "its process was ended by SIGKILL (node 1)"))
    theirs.close()

    def send_some() -> None:
        for _ in range(9):  # the kernel takes the first
            rank.send_bytes(b"order")
            time.sleep(0.05)

    with pytest.raises(RankGoneError, match="ended by SIGKILL"):
        send_some()


def test_killing_a_rank_ends_the_connection_also_for_the_other_node(remote: tuple[RemoteRank, Peer]) -> None:
    rank, theirs = remote
    rank.kill("the first reason")
    rank.kill("another one")
    with pytest.raises(RankGoneError, match="the first reason"):
        rank.receive(1.0)
    with pytest.raises(EOFError):
        theirs.pipe.recv()
    rank.end(0.0)


def test_the_end_waits_for_the_other_node(remote: tuple[RemoteRank, Peer]) -> None:
    rank, theirs = remote
    started_s = time.monotonic()
    threading.Timer(0.3, theirs.close).start()
    rank.end(10.0)
    assert 0.2 < time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("its process was ended by SIGKILL", [Gone(3, "its process was ended by SIGKILL (node 1)")] * 2),
        (None, [Gone(rank, "the command of its node was ended (node 1)") for rank in (2, 3)]),
    ],
)
def test_node_0_is_told_of_the_first_rank_that_ended_unasked(ending: str | None, expected: list[Gone]) -> None:
    told: list[Gone] = []
    ended: list[int] = []
    closed: list[int] = []

    def rank_of(rank: int, ending: str | None, *, has_stopped: bool = False) -> Any:
        process = SimpleNamespace(
            rank=rank, has_stopped_as_asked=has_stopped, ending=lambda _: ending, end=lambda _: ended.append(rank)
        )
        peer = SimpleNamespace(pipe=SimpleNamespace(send=told.append), close=lambda: closed.append(rank))
        return node._Rank(peer, process)

    node_at(1)._end([rank_of(1, "its process exited with 0", has_stopped=True), rank_of(2, None), rank_of(3, ending)])
    assert told == expected
    assert (ended, closed) == ([2, 3], [1, 2, 3])


def test_silence_of_a_machine_is_limited_on_each_connection() -> None:
    for peer in map(Peer, connected()):
        options = {
            "keepalive": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            "nodelay": (socket.IPPROTO_TCP, socket.TCP_NODELAY),
        }
        assert all(peer.socket.getsockopt(*option) for option in options.values())
        assert peer.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * LOST_AFTER_S
        peer.close()


def test_connections_that_a_library_makes_are_limited_too() -> None:
    before = connected()
    with limit_new_connections(True):
        made = connected()
    with limit_new_connections(False):
        unlimited = connected()
    for ends, is_limited in ((before, False), (made, True), (unlimited, False)):
        for end in ends:
            assert bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)) == is_limited
            end.close()


@pytest.mark.parametrize(
    ("rendezvous", "named", "seen"),
    [(StoreAddress(LOOPBACK, 1), None, "=lo"), (StoreAddress(LOOPBACK, 1), "ib0", "ib0"), (Path("file"), None, None)],
)
def test_nccl_connects_through_the_interface_of_the_nodes_address(
    monkeypatch: pytest.MonkeyPatch, rendezvous: Any, named: str | None, seen: str | None
) -> None:
    """Its variable is set while it connects, where several nodes do and the user has set none."""
    made: list[str | None] = []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            made.append(os.environ.get("NCCL_SOCKET_IFNAME"))

    stores = {name: lambda *_, **named: None for name in ("TCPStore", "FileStore")}
    monkeypatch.setattr(process_group, "_DIST", SimpleNamespace(ProcessGroupNCCL=Nccl, **stores))
    monkeypatch.setattr(ProcessRanks, "smallest", lambda group, number: number)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if named is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", named)
    sizes: dict[str, Any] = {"num_ranks": 2, "device": torch.device("cuda"), "timeout_s": 1.0}
    ProcessRanks.join(rendezvous, rank=1, address=LOOPBACK, **sizes)
    assert made == [seen] and os.environ.get("NCCL_SOCKET_IFNAME") == named
