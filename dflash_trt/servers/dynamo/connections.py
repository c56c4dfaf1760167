"""Connections of the gateway's clients: their number is limited, and idle ones give way.

A client that has not sent a whole request is idle, so opening connections cannot lock others out.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dflash_trt.servers.dynamo.answers import error_object

MAX_CONNECTIONS: Final = 4096
BACKLOG: Final = 128
_RESERVED_FILES: Final = 2 * BACKLOG  # for connections that asyncio has accepted at once, libraries and logs
_FULL: Final = "every connection of this server has a request that runs; try again later"


class Connections:
    """At most `limit` connections: a new one replaces the longest idle one, or is answered with 503."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._busy: set[Any] = set()

    def accepting(self, server: Any) -> Callable[[], asyncio.Protocol]:
        """The protocol factory of aiohttp's `server` within the limit."""

        def accept() -> asyncio.Protocol:
            opened = [handler for handler in server.connections if handler.transport is not None]  # the oldest first
            if len(opened) >= self._limit:
                idle = next((handler for handler in opened if handler not in self._busy), None)
                if idle is None:
                    return _Full()
                idle.force_close()
            protocol: asyncio.Protocol = server()
            return protocol

        return accept

    @contextmanager
    def busy(self, handler: Any) -> Iterator[None]:
        """The connection of `handler` has a request that runs."""
        self._busy.add(handler)
        try:
            yield
        finally:
            self._busy.discard(handler)


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        body = json.dumps(error_object(503, _FULL))
        head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        transport.close()


def raise_file_limit() -> int:
    """Let this process open as many files as it may; returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # no limit, which the kernel has
        return soft
    return hard


def max_connections(num_files: int) -> int:
    """Clients that `num_files` open files allow; each may also need a connection to the front end."""
    return max(1, min(MAX_CONNECTIONS, (num_files - _RESERVED_FILES) // 2))
