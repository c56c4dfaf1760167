"""The ranks of one node but node 0: its processes, which follow the orders of node 0's rank 0."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from dflash_trt.core.errors import ConfigError, RankError, raise_all
from dflash_trt.executor.ranks.joining import Greeting, Peer, PeerError, read_secret
from dflash_trt.executor.ranks.launcher import end_stopped
from dflash_trt.executor.ranks.messages import Gone, WorkerProcess
from dflash_trt.executor.ranks.nodes import JOIN_TIMEOUT_S

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir

_POLL_S = 0.1
_RETRY_S = 0.5
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Rank:
    peer: Peer
    process: WorkerProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One of `nnodes`, which joins node 0 at `master_addr`:`master_port`."""

    engine: EngineDir
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int

    def run(self) -> None:
        """Run this node's ranks until node 0 closes the engine.

        Raises:
            ConfigError: node 0 has other software, another engine or other options, or another secret.
            RankError: node 0 did not answer within JOIN_TIMEOUT_S, or was lost; or a rank failed.
        """
        peers = self._join(read_secret())
        ranks = [_Rank(peer, WorkerProcess(rank, peer.pipe.fileno())) for rank, peer in peers.items()]
        try:
            with _ended_if_stopped([rank.process for rank in ranks]):
                self._watch(ranks)
        finally:
            self._end(ranks)

    @property
    def _ranks(self) -> range:
        """Raises ConfigError: the engine's ranks do not fill the nodes, or it has no such node."""
        num_ranks = self.engine.manifest.pretrained_config.mapping.world_size
        if num_ranks % self.nnodes or self.nnodes < 2:
            expected = f"a divisor of {num_ranks}, the engine's ranks, from 2 on"
            raise ConfigError.about("--nnodes", expected=expected, found=str(self.nnodes))
        if not 1 <= self.node_rank < self.nnodes:
            hint = "Node 0 is the engine's own: run, serve, worker or LLM."
            expected = f"1 to {self.nnodes - 1}"
            raise ConfigError.about("--node-rank", expected=expected, found=str(self.node_rank), hint=hint)
        num_local = num_ranks // self.nnodes
        return range(self.node_rank * num_local, (self.node_rank + 1) * num_local)

    @property
    def _master(self) -> str:
        return f"node 0 at {self.master_addr}:{self.master_port}"

    def _join(self, secret: bytes) -> dict[int, Peer]:
        peers: dict[int, Peer] = {}
        end_s = time.monotonic() + JOIN_TIMEOUT_S
        try:
            for rank in self._ranks:
                peers[rank] = Peer(self._connected(end_s))
                self._greet(peers[rank], secret, rank)
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
        return peers

    def _connected(self, end_s: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.master_addr, self.master_port), _CONNECT_TIMEOUT_S)
            except OSError as error:
                if time.monotonic() > end_s:
                    hint = "Start node 0 with --nnodes, and the same --master-addr and --master-port."
                    expected = f"an answer within {JOIN_TIMEOUT_S:.0f} s"
                    raise RankError.about(self._master, expected=expected, found=str(error), hint=hint) from error
                time.sleep(_RETRY_S)

    def _greet(self, peer: Peer, secret: bytes, rank: int) -> None:
        greeting = Greeting.of(self.engine, nnodes=self.nnodes, rank=rank, address=peer.own_address)
        try:
            problems = peer.greet(secret, greeting)
        except PeerError as error:
            hint = "Set DFLASH_TRT_SECRET to the same value on all nodes, and name node 0's port."
            raise ConfigError.about(
                self._master, expected="dflash-trt with the secret of this node", found=str(error), hint=hint
            ) from error
        raise_all(ConfigError, f"{self._master} refused rank {rank}", problems)

    def _watch(self, ranks: Sequence[_Rank]) -> None:
        """Return when rank 0 has stopped all of them."""
        running = list(ranks)
        poller = select.poll()
        for rank in running:
            poller.register(rank.peer.socket, select.POLLRDHUP)
        while running:
            if poller.poll(1000 * _POLL_S):
                self._lost()
            for rank in [rank for rank in running if (rank.process.ending(0.0)) is not None]:
                if not rank.process.has_stopped_as_asked:
                    if poller.poll(0):  # it ended because of that
                        self._lost()
                    self._failed(rank.process)
                poller.unregister(rank.peer.socket)
                running.remove(rank)
                rank.peer.close()

    def _lost(self) -> NoReturn:
        hint = "It has ended, was lost, or gave up after a failure that it names. All ranks of this node were ended."
        raise RankError.about(self._master, expected="an open connection", found="a closed one", hint=hint)

    def _failed(self, process: WorkerProcess) -> NoReturn:
        hint = "All ranks of this node were ended. Node 0 says more, unless it was lost."
        raise RankError(f"rank {process.rank} failed: {process.ending(0.0)}. {hint}")

    def _end(self, ranks: Sequence[_Rank]) -> None:
        """Kill the processes that run, and tell rank 0 of the first that has ended unasked, if any did."""
        unasked = [rank for rank in ranks if not rank.process.has_stopped_as_asked]
        endings = {rank.process.rank: rank.process.ending(0.0) for rank in unasked}
        where = f"(node {self.node_rank})"
        first = next((Gone(rank, f"{how} {where}") for rank, how in endings.items() if how is not None), None)
        for rank in unasked:
            rank.process.end(0.0)
            with suppress(OSError):
                rank.peer.pipe.send(first or Gone(rank.process.rank, f"the command of its node was ended {where}"))
        for rank in ranks:
            rank.peer.close()


@contextmanager
def _ended_if_stopped(processes: Sequence[WorkerProcess]) -> Iterator[None]:
    """Kill processes that are stopped by a signal."""
    always, is_over = threading.Event(), threading.Event()
    always.set()
    threading.Thread(target=end_stopped, args=(processes, always, is_over), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
