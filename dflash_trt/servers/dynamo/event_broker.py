"""Broker of events from workers to the front end's router: a forwarding thread on Unix sockets."""

import threading
from typing import Self

import zmq


class EventBroker:
    """A context manager; listens at two addresses of ZeroMQ."""

    def __init__(self, incoming: str, outgoing: str) -> None:
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.XSUB), self._context.socket(zmq.XPUB)]
        for socket, address in zip(self._sockets, (incoming, outgoing), strict=True):
            socket.bind(address)
        self._thread = threading.Thread(target=self._forward, name="dflash-event-broker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.term()  # ends the proxy, which closes its sockets
        self._thread.join()

    def _forward(self) -> None:
        try:
            zmq.proxy(*self._sockets)
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in self._sockets:
                socket.close(linger=0)
