"""Prefix cache events for a router: each cached page is a block that need not be computed again.

The engine's thread only queues events; a thread of this module hashes and publishes them.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_LOG = logging.getLogger(__name__)
_PERIOD_S = 0.25  # between reports of the load


class BlockPublisher(Protocol):
    """As Dynamo's KvEventPublisher; block hashes are signed 64-bit integers."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None: ...

    def publish_removed(self, block_hashes: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stored:
    block_id: int
    parent_id: int | None
    token_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True, slots=True)
class _Removed:
    block_id: int


class PrefixEvents:
    """A PrefixWatcher. Blocks that are cached before `publish_to` are unknown to the router."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[_Stored | _Removed | None] = queue.SimpleQueue()
        self._hashes: dict[int, int] = {}  # by block id
        self._publisher: BlockPublisher | None = None
        self._thread: threading.Thread | None = None

    def start(self, tick: Callable[[], None]) -> None:
        """`tick` is called a few times a second, in the thread of the publisher."""
        self._thread = threading.Thread(target=self._run, args=(tick,), name="dflash-prefix-events", daemon=True)
        self._thread.start()

    def publish_to(self, publisher: BlockPublisher) -> None:
        self._publisher = publisher

    def stored(self, block_id: int, parent_id: int | None, token_ids: tuple[int, ...], salt: str) -> None:
        self._notes.put(_Stored(block_id, parent_id, token_ids, salt))

    def removed(self, block_id: int) -> None:
        self._notes.put(_Removed(block_id))

    def close(self) -> None:
        if self._thread is not None:
            self._notes.put(None)
            self._thread.join()

    def _run(self, tick: Callable[[], None]) -> None:
        due_s = time.monotonic()
        while True:
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + _PERIOD_S
                self._guarded(tick)
            try:
                note = self._notes.get(timeout=_PERIOD_S)
            except queue.Empty:
                continue
            if note is None:
                return
            self._guarded(self._publish, note)

    def _publish(self, note: _Stored | _Removed) -> None:
        if isinstance(note, _Removed):
            block_hash = self._hashes.pop(note.block_id)
            if self._publisher is not None:
                self._publisher.publish_removed([block_hash])
            return
        parent = None if note.parent_id is None else self._hashes[note.parent_id]
        # Equal on every replica: hashes of integers do not depend on the process. A salt parts the roots.
        salt = tuple(note.salt.encode()) if parent is None else ()
        block_hash = self._hashes[note.block_id] = hash((parent or 0, salt, note.token_ids))
        if self._publisher is not None:
            self._publisher.publish_stored(
                list(note.token_ids), [len(note.token_ids)], [block_hash], parent, cache_salt=note.salt or None
            )

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 - routing is worse then, and serving goes on
            _LOG.exception("the router was not told")
