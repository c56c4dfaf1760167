"""Node 0's side of ranks on several nodes: the port that the others join through, and their ranks."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from dflash_trt.backends.torch.process_group import StoreAddress
from dflash_trt.core.errors import ConfigError, RankError, problem
from dflash_trt.core.tcp import LOST_AFTER_S
from dflash_trt.executor.ranks.joining import Greeting, Peer, PeerError, read_secret
from dflash_trt.executor.ranks.messages import Gone, OpenShard, RankConnection, RankGoneError

if TYPE_CHECKING:
    from dflash_trt.core.runtime_config import RuntimeConfig
    from dflash_trt.engine_dir import EngineDir

JOIN_TIMEOUT_S = 300.0  # until the commands of all nodes have been started
_LAST_WORD_TIMEOUT_S = 1.0
_ACCEPT_POLL_S = 0.5
_BACKLOG = 128
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
_DIST: Any = distributed  # its stores are untyped in PyTorch
_LOG = logging.getLogger(__name__)


class RemoteRank(RankConnection):
    """A worker on another node, whose command watches its process."""

    def __init__(self, greeting: Greeting, peer: Peer) -> None:
        super().__init__(greeting.rank, peer.pipe)
        self._greeting = greeting
        self._peer = peer

    def localized(self, order: OpenShard) -> OpenShard:
        """The order with the engine's directory and the address of the rank's node."""
        return replace(order, engine_dir=self._greeting.engine_dir, address=self._greeting.address)

    @property
    def is_stopped(self) -> bool:
        """Its node ends a process that is stopped."""
        return False

    @property
    def has_ended(self) -> bool:
        return self._hangs_up_within(0.0)

    def wait(self) -> None:
        self._hangs_up_within(None)

    def kill(self, reason: str | None = None) -> None:
        if reason is not None:
            self._ended_by(Gone(self.rank, reason))
        self._peer.shut_down()

    def end(self, timeout_s: float) -> None:
        self._hangs_up_within(timeout_s)
        self._peer.close()

    def _hangs_up_within(self, timeout_s: float | None) -> bool:
        poller = select.poll()
        poller.register(self._peer.socket, select.POLLRDHUP)
        return bool(poller.poll(None if timeout_s is None else 1000 * timeout_s))

    def _ending(self, error: Exception) -> RankGoneError:
        gone = self._gone or self._last_word()
        if gone is not None:
            return self._ended_by(gone)
        node = f"its node {self._greeting.address}"
        if isinstance(error, OSError) and error.errno in _SILENT:
            return RankGoneError(f"{node} has been silent for {LOST_AFTER_S} s")
        return RankGoneError(f"{node} closed the connection")

    def _last_word(self) -> Gone | None:
        """The node's, after reports that nobody has read."""
        with suppress(EOFError, OSError):
            while self._pipe.poll(_LAST_WORD_TIMEOUT_S):
                if isinstance(report := self._pipe.recv(), Gone):
                    return report
        return None


class Nodes:
    """Listens on this node's master address alone: for ranks that join, and with the store of their rendezvous."""

    def __init__(self, engine: EngineDir, config: RuntimeConfig) -> None:
        """Raises ConfigError: no secret, or an address or a port that this machine does not have."""
        assert config.master_addr is not None, "checked when the engine is opened"
        self._secret = read_secret()
        self._listener = _listening(config.master_addr, config.master_port)
        self._port = config.master_port
        self._joined: dict[int, RemoteRank] = {}
        self.address = str(self._listener.getsockname()[0])
        self._own = Greeting.of(engine, nnodes=config.nnodes, rank=0, address=self.address)
        num_ranks = engine.manifest.pretrained_config.mapping.world_size
        self._num_local_ranks = num_ranks // config.nnodes
        self._ranks = range(self._num_local_ranks, num_ranks)
        with _listening(config.master_addr, 0) as store:
            self.store_address = StoreAddress(self.address, int(store.getsockname()[1]))
            self._store: Any = _DIST.TCPStore(
                *self.store_address,
                is_master=True,
                timeout=timedelta(seconds=JOIN_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=store.detach(),
            )

    def wait(self) -> None:
        """Return when all ranks of other nodes have joined; then nobody can join any more.

        Raises:
            RankError: they did not, within JOIN_TIMEOUT_S.
        """
        end_s = time.monotonic() + JOIN_TIMEOUT_S
        self._listener.settimeout(_ACCEPT_POLL_S)
        with self._listener:
            while missing := [rank for rank in self._ranks if rank not in self._joined]:
                if time.monotonic() > end_s:
                    raise self._missing_nodes(missing)
                with suppress(TimeoutError):
                    self._receive(Peer(self._listener.accept()[0]))

    def take(self, rank: int) -> RemoteRank | None:
        """The rank that has joined; None for a rank of this node."""
        return self._joined.pop(rank, None)

    def close(self) -> None:
        """End the ranks that nobody has taken, and the store. Calling it again does nothing."""
        self._listener.close()
        for rank in self._joined.values():
            rank.kill()
            rank.end(0.0)
        self._joined.clear()
        self._store = None

    def _receive(self, peer: Peer) -> None:
        try:
            greeting = peer.receive_greeting(self._secret)
            problems = greeting.problems(self._own) or self._rank_problems(greeting.rank)
            peer.answer(problems)
        except PeerError as error:
            _LOG.warning("refused a connection from %s: %s", peer.address, error)
            peer.close()
            return
        if problems:
            _LOG.warning("refused rank %s of %s:\n%s", greeting.rank, peer.address, "\n".join(problems))
            peer.close()
            return
        if (left := self._joined.pop(greeting.rank, None)) is not None:
            left.end(0.0)
        self._joined[greeting.rank] = RemoteRank(greeting, peer)

    def _rank_problems(self, rank: int) -> list[str]:
        node = rank // self._num_local_ranks
        if rank not in self._ranks:
            return [problem("node rank", expected=f"1 to {self._own.nnodes - 1}", found=str(node))]
        before = self._joined.get(rank)
        if before is not None and not before.has_ended:
            hint = "Give each node a --node-rank of its own."
            return [problem("node rank", expected="one that has not joined", found=f"{node}, again", hint=hint)]
        return []

    def _missing_nodes(self, ranks: list[int]) -> RankError:
        nodes = ", ".join(map(str, sorted({rank // self._num_local_ranks for rank in ranks})))
        hint = f"Run `dflash-trt ranks` there with --master-addr {self.address} --master-port {self._port}."
        expected = f"{self._own.nnodes} nodes within {JOIN_TIMEOUT_S:.0f} s"
        return RankError.about("nodes", expected=expected, found=f"nobody of node {nodes}", hint=hint)


def _listening(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        hint = "Name an address of this machine, node 0, and a port that is free."
        expected = f"{host}:{port} to listen on"
        raise ConfigError.about("--master-addr", expected=expected, found=str(error), hint=hint) from error
