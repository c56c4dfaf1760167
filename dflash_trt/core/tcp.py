"""TCP connections between machines: a peer that is unplugged or without power is noticed in bounded time.

Linux closes a connection whose packets nobody acknowledges after fifteen minutes, and never one that sends nothing.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LOOPBACK = "127.0.0.1"
LOST_AFTER_S = 20  # without an acknowledgement of data or of a probe
_PROBE_S = 5


def limit_silence(connection: socket.socket) -> None:
    """End the connection with an error when the peer's machine is silent for LOST_AFTER_S.

    A peer that computes or is stopped is not silent: its kernel answers.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S)


@contextmanager
def limit_new_connections(is_wanted: bool) -> Iterator[None]:
    """`limit_silence` of the connections that are made in the block; gloo has no such option."""
    before = _connections() if is_wanted else set()
    yield
    for descriptor in (_connections() if is_wanted else set()) - before:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            limit_silence(connection)


def interface_of(address: str) -> str | None:
    """The network interface that has this address."""
    names = (
        str(name)
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address.partition("%")[0] == address for each in addresses)
    )
    return next(names, None)


def _connections() -> set[int]:
    """Descriptors of this process's established TCP connections."""
    found = psutil.Process().net_connections("tcp")
    return {connection.fd for connection in found if connection.status == psutil.CONN_ESTABLISHED}
