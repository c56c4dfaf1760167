"""Connections of ranks on other nodes to node 0: both sides prove that they know the secret, then they are compared.

Orders and reports are pickled, so nothing of them is read from a peer without the secret.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any, Self

import torch

import dflash_trt
from dflash_trt.core.errors import ConfigError, problem
from dflash_trt.core.tcp import limit_silence

if TYPE_CHECKING:
    from dflash_trt.engine_dir import EngineDir

SECRET = "DFLASH_TRT_SECRET"  # an environment variable
_MIN_SECRET_LENGTH = 16
_MAX_GREETING_BYTES = 2**16
_READ_TIMEOUT_S = 10
_TURN_TIMEOUT_S = 100  # node 0 receives one peer at a time
_COMPARED = ("software", "engine", "nnodes")


class PeerError(Exception):
    """The peer does not know the secret, or speaks another protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Greeting:
    """A rank that joins. Node 0 has the same `software`, `engine` and `nnodes`."""

    software: str
    engine: str  # hash of its contents
    nnodes: int
    rank: int
    engine_dir: str  # on the rank's node
    address: str  # of the rank's node, for other ranks

    @classmethod
    def of(cls, engine: EngineDir, *, nnodes: int, rank: int, address: str) -> Self:
        versions = f"dflash-trt {dflash_trt.__version__}, PyTorch {torch.__version__}"
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return cls(
            software=f"{versions}, {python}",
            engine=engine.sha256,
            nnodes=nnodes,
            rank=rank,
            engine_dir=str(engine.path.absolute()),
            address=address,
        )

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Raises KeyError or ValueError."""
        words = {name: str(fields[name]) for name in ("software", "engine", "engine_dir", "address")}
        return cls(nnodes=int(fields["nnodes"]), rank=int(fields["rank"]), **words)

    def problems(self, own: Greeting) -> list[str]:
        """What differs from node 0's `own`."""
        hints = {
            "software": "Install the same on all nodes.",
            "engine": "Copy the engine directory of node 0.",
            "nnodes": "Pass the same --nnodes on all nodes.",
        }
        pairs = {name: (getattr(own, name), getattr(self, name)) for name in _COMPARED}
        return [
            problem(name, expected=f"{expected}, as node 0", found=str(found), hint=hints[name])
            for name, (expected, found) in pairs.items()
            if expected != found
        ]


def read_secret() -> bytes:
    """Raises ConfigError without a secret that cannot be guessed."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _MIN_SECRET_LENGTH:
        expected = f"a secret of {_MIN_SECRET_LENGTH} characters or more, the same on all nodes"
        hint = "Set it to the output of `openssl rand -hex 32` for example."
        raise ConfigError.about(SECRET, expected=expected, found=f"{len(secret)} characters", hint=hint)
    return secret.encode()


class Peer:
    """One side of a connection. Nothing may be read from `pipe` before the peer has greeted, or was greeted."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        limit_silence(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an order may be two packets
        self.socket = connected
        self.pipe: Connection[Any, Any] = Connection(os.dup(connected.fileno()))

    @property
    def address(self) -> str:
        """The other side's."""
        return str(self.socket.getpeername()[0])

    @property
    def own_address(self) -> str:
        return str(self.socket.getsockname()[0])

    def receive_greeting(self, secret: bytes) -> Greeting:
        """Node 0's side. Raises PeerError."""
        with self._handshake(_READ_TIMEOUT_S):
            deliver_challenge(self.pipe, secret)
            answer_challenge(self.pipe, secret)
            return Greeting.of_fields(self._receive_json())

    def answer(self, problems: list[str]) -> None:
        """Take the rank that has greeted if there are no problems. Raises PeerError."""
        with self._handshake(_READ_TIMEOUT_S):
            self.pipe.send_bytes(json.dumps({"problems": problems}).encode())

    def greet(self, secret: bytes, greeting: Greeting) -> list[str]:
        """The other nodes' side: node 0's `answer`. Raises PeerError."""
        with self._handshake(_TURN_TIMEOUT_S):
            answer_challenge(self.pipe, secret)
            deliver_challenge(self.pipe, secret)
            self.pipe.send_bytes(json.dumps(asdict(greeting)).encode())
            return [str(each) for each in self._receive_json()["problems"]]

    def shut_down(self) -> None:
        """End both directions; the other side reads an end of file, whoever else has the socket."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended
            return

    def close(self) -> None:
        self.pipe.close()
        self.socket.close()

    def _receive_json(self) -> Mapping[str, Any]:
        fields = json.loads(self.pipe.recv_bytes(_MAX_GREETING_BYTES))
        if not isinstance(fields, dict):
            raise PeerError("no object of JSON")
        return fields

    @contextmanager
    def _handshake(self, timeout_s: int) -> Iterator[None]:
        """Limit the time of each read."""
        try:
            self._limit_reads(timeout_s)
            yield
            self._limit_reads(0)
        except (AuthenticationError, AssertionError) as error:  # the second is of a peer that sends something else
            raise PeerError(
                "it has another secret" if isinstance(error, AuthenticationError) else str(error)
            ) from error
        except BlockingIOError as error:
            raise PeerError(f"no answer for {timeout_s} s") from error
        except (EOFError, OSError, ValueError, KeyError) as error:
            raise PeerError(f"{type(error).__name__}: {error}") from error

    def _limit_reads(self, seconds: int) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
