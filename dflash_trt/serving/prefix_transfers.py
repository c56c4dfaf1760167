"""Blocks of the prefix cache on their way to and from a store, in threads beside the engine loop.

To the store go blocks that have come to the host's tier. From it come those that a new request may begin with: the
request is set aside until they are there, or are not. All methods are called under the engine's lock.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Protocol, TypeVar

from dflash_trt.core.host_resources import available_cores
from dflash_trt.core.request import Request
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.stored_prefixes import Block, StoredPrefixes, Transfer

_NUM_FINDERS: Final = 2  # threads that look for the blocks of a request
_MAX_COPIERS: Final = 8  # threads that read blocks at most, and that write them
_CORES_PER_COPIER: Final = 4
_NICENESS: Final = 10  # of those that write: they have the time that is left, unless others wait for all
_PART_OF_PLACES: Final = 4  # at most this part of the places is being saved
_WEIGHT: Final = 0.2  # of the newest rate in an average
_HOPE: Final = 1.1  # a store that was too slow is tried again after some requests

_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)

PlaceBytes = Callable[[int, bool], list[memoryview]]  # of a place, and whether it is a snapshot's; on each rank


class PrefixStore(Protocol):
    """Thread-safe."""

    def knows(self, block: Block) -> bool:
        """True if it surely has the block, or had; quick."""
        ...

    def find(self, key: bytes) -> list[Block]:
        """Blocks of a key that are there: pages, a snapshot, both or none."""
        ...

    def read(self, block: Block, parts: Sequence[memoryview]) -> bool:
        """Fill the parts, one for each rank; False if the block is not as it was written."""
        ...

    def write(self, block: Block, parts: Sequence[bytes]) -> bool:
        """Keep a block; False if that failed."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Load:
    """Blocks of a prompt, and the request that is set aside for them; None if it is still to come."""

    token_ids: Sequence[int]
    salt: str
    request_id: str | None = None
    keys: list[bytes] = field(default_factory=list)  # of the prompt
    transfers: list[Transfer] = field(default_factory=list)
    num_bytes: int = 0
    era: int = 0
    followers: "list[_Load]" = field(default_factory=list)  # wait for the same blocks

    @property
    def names(self) -> set[tuple[bytes, bool]]:
        return {transfer.block.name for transfer in self.transfers}


class PrefixTransfers:
    """Between a scheduler's host tier and a store. `wake` makes the engine loop call `advance`, from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: StoredPrefixes,
        store: PrefixStore,
        *,
        place_bytes: PlaceBytes,
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._store = store
        self._place_bytes = place_bytes
        self._wake = wake
        copiers = min(_MAX_COPIERS, available_cores() // _CORES_PER_COPIER)
        self._finders = ThreadPoolExecutor(_NUM_FINDERS, thread_name_prefix="dflash-prefixes")
        self._readers = ThreadPoolExecutor(max(2, copiers), thread_name_prefix="dflash-prefixes-in")
        name, give_way = "dflash-prefixes-out", None if prefixes.publishes_all else _give_way
        self._writers = ThreadPoolExecutor(max(1, copiers), thread_name_prefix=name, initializer=give_way)
        self._done: deque[Callable[[], None]] = deque()
        self._loads: list[_Load] = []  # that read
        self._num_aside = 0
        self._early: set[bytes] = set()  # last keys of prompts that are read before their requests come
        self._num_saving = 0
        self._era = 0  # of the executor
        self._read_rate: float | None = None  # bytes per second

    @property
    def is_waited_for(self) -> bool:
        """A request is set aside, or a prompt is read for one that comes later."""
        return bool(self._num_aside or self._early)

    @property
    def has_news(self) -> bool:
        """`advance` has something to do."""
        return bool(self._done)

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way to the store."""
        return not self._num_saving and not self._prefixes.has_arrivals

    def keys(self, token_ids: Sequence[int], *, salt: str) -> list[bytes]:
        """See `StoredPrefixes.keys`."""
        return self._prefixes.keys(token_ids, salt=salt)

    def has_saved(self, keys: Sequence[bytes]) -> bool:
        """The store has the pages of these blocks."""
        return all(self._store.knows(Block(key=key, is_state=False, groups=1)) for key in keys)

    def begin(self, request: Request) -> None:
        """Set a request aside that was queued just now, if the store may have more of its prompt than the engine."""
        tokens, salt = request.prompt_token_ids, request.cache_salt
        if request.sampling.prompt_logprobs is None and self._is_incomplete(tokens, salt):
            self._num_aside += 1
            self._scheduler.set_aside(request.request_id)
            self._look(_Load(token_ids=tokens, salt=salt, request_id=request.request_id))

    def missing(self, token_ids: Sequence[int], keys: Sequence[bytes], *, salt: str) -> bytes | None:
        """The key of the first block of a prompt that the engine does not have; `keys` are of `keys`."""
        num_known = self._prefixes.num_known(token_ids, salt=salt)
        return keys[num_known] if num_known < len(keys) else None

    def has_found(self, key: bytes) -> bool:
        """The store has the block now. In any thread, without the lock."""
        return bool(self._store.find(key))

    def read_early(self, token_ids: Sequence[int], keys: Sequence[bytes], *, salt: str) -> None:
        """Begin to read what the store has of a prompt whose request is to come, unless that has begun."""
        if keys[-1] not in self._early:
            self._early.add(keys[-1])
            self._look(_Load(token_ids=token_ids, salt=salt, keys=list(keys)))

    def advance(self) -> None:
        """Do what follows transfers that have ended, and begin to save what has come to the host's tier."""
        while self._done:
            self._done.popleft()()
        most = max(1, self._prefixes.num_places // _PART_OF_PLACES)
        while self._num_saving < most and (arrivals := self._prefixes.arrivals(most - self._num_saving)):
            for node, block in arrivals:
                if not self._store.knows(block):
                    self._save(self._prefixes.begin_saving(node, block))

    def lose_device(self, place_bytes: PlaceBytes) -> None:
        """The places are gone with what they held; others are there."""
        self._era += 1
        self._place_bytes = place_bytes

    def close(self) -> None:
        """Wait for the transfers that have begun."""
        self._finders.shutdown()
        self._readers.shutdown()
        self._writers.shutdown()

    # To the store

    def _save(self, transfer: Transfer) -> None:
        parts, era = self._place_bytes(transfer.place, transfer.block.is_state), self._era
        self._num_saving += 1

        def write() -> bool:
            return self._store.write(transfer.block, [bytes(part) for part in parts])

        def saved(is_saved: bool | None) -> None:
            self._num_saving -= 1
            if era == self._era:
                self._prefixes.end_saving(transfer, is_saved=bool(is_saved))

        self._start(self._writers, write, saved)

    # From the store

    def _is_incomplete(self, token_ids: Sequence[int], salt: str) -> bool:
        return self._prefixes.num_known(token_ids, salt=salt) < self._prefixes.num_blocks(token_ids)

    def _look(self, load: _Load) -> None:
        """Ask the store for the blocks of a prompt that the engine does not have."""
        tokens, salt = load.token_ids, load.salt
        start = self._prefixes.num_known(tokens, salt=salt)

        def find() -> list[list[Block]]:
            load.keys = load.keys or self._prefixes.keys(tokens, salt=salt)
            return list(takewhile(bool, map(self._store.find, load.keys[start:])))

        self._start(self._finders, find, lambda found: self._found(load, start, found or []))

    def _found(self, load: _Load, start: int, found: list[list[Block]]) -> None:
        names = {block.name for blocks in found for block in blocks}
        other = next((other for other in self._loads if names & other.names), None)
        if other is not None:
            other.followers.append(load)
            return
        load.transfers = self._prefixes.begin_loading(load.token_ids, found, start=start, salt=load.salt)
        parts = {transfer: self._place_bytes(transfer.place, transfer.block.is_state) for transfer in load.transfers}
        load.num_bytes, load.era = sum(len(part) for each in parts.values() for part in each), self._era
        if not load.transfers or not self._is_faster(load):
            self._finish(load, frozenset())
            return
        self._loads.append(load)

        def read() -> tuple[frozenset[Transfer], float]:
            started_s = time.perf_counter()
            has_come = self._readers.map(
                lambda transfer: self._store.read(transfer.block, parts[transfer]), load.transfers
            )
            come = takewhile(lambda pair: pair[1], zip(load.transfers, list(has_come), strict=True))
            return frozenset(transfer for transfer, _ in come), time.perf_counter() - started_s

        self._start(self._finders, read, lambda outcome: self._loaded(load, *(outcome or (frozenset(), None))))

    def _is_faster(self, load: _Load) -> bool:
        """Whether reading takes less time than computing; what is not known yet is tried, and nobody waits early."""
        prompt_rate, num_pages = self._scheduler.prompt_rate, sum(not t.block.is_state for t in load.transfers)
        if load.request_id is None or prompt_rate is None or self._read_rate is None:
            return True
        is_faster = load.num_bytes / self._read_rate < num_pages * self._prefixes.page_size / prompt_rate
        if not is_faster:
            self._read_rate *= _HOPE
        return is_faster

    def _loaded(self, load: _Load, come: frozenset[Transfer], seconds: float | None) -> None:
        self._loads.remove(load)
        if seconds and len(come) == len(load.transfers) and load.request_id is not None:
            rate = load.num_bytes / seconds
            self._read_rate = rate if self._read_rate is None else self._read_rate + _WEIGHT * (rate - self._read_rate)
        self._finish(load, come)

    def _finish(self, load: _Load, come: frozenset[Transfer]) -> None:
        """Cache what has come, and let the request take its turn; its followers look again."""
        if load.era == self._era:
            self._prefixes.end_loading(
                load.token_ids, load.keys, load.transfers, salt=load.salt, has_come=come.__contains__
            )
        if load.request_id is None:
            self._early.discard(load.keys[-1])
        else:
            self._num_aside -= 1
            self._scheduler.take_up(load.request_id)
        for follower in load.followers:
            self._look(follower)

    def _start(self, threads: ThreadPoolExecutor, act: Callable[[], _T], then: Callable[[_T | None], None]) -> None:
        """Act in a thread, then in the engine's; with None if it failed."""

        def run() -> None:
            result = None
            try:
                result = act()
            except Exception:  # noqa: BLE001 - a miss
                _LOG.exception("a transfer of cached prefixes failed")
            self._done.append(lambda: then(result))
            self._wake()

        threads.submit(run)


class TransfersOfRanks:
    """`PrefixTransfers` of ranks that cache prefixes of their own, as one.

    A block in the store has the bytes of one rank, and any rank may read it.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        prefixes: Sequence[StoredPrefixes],
        store: PrefixStore,
        *,
        place_bytes: PlaceBytes,
        wake: Callable[[], None],
    ) -> None:
        """`schedulers` and `prefixes` are of each rank."""
        self._schedulers = schedulers
        self._ranks = [
            PrefixTransfers(scheduler, of_rank, store, place_bytes=_bytes_of_rank(place_bytes, rank), wake=wake)
            for rank, (scheduler, of_rank) in enumerate(zip(schedulers, prefixes, strict=True))
        ]

    @property
    def is_waited_for(self) -> bool:
        return any(transfers.is_waited_for for transfers in self._ranks)

    @property
    def has_news(self) -> bool:
        return any(transfers.has_news for transfers in self._ranks)

    @property
    def is_idle(self) -> bool:
        return all(transfers.is_idle for transfers in self._ranks)

    def keys(self, token_ids: Sequence[int], *, salt: str) -> list[bytes]:
        return self._ranks[0].keys(token_ids, salt=salt)

    def has_saved(self, keys: Sequence[bytes]) -> bool:
        return self._ranks[0].has_saved(keys)

    def begin(self, request: Request) -> None:
        """On the rank where the request waits."""
        for scheduler, transfers in zip(self._schedulers, self._ranks, strict=True):
            if request.request_id in scheduler:
                transfers.begin(request)

    def missing(self, token_ids: Sequence[int], keys: Sequence[bytes], *, salt: str) -> bytes | None:
        """The last block's key, for the rank is known once the request waits on it."""
        return keys[-1] if keys else None

    def has_found(self, key: bytes) -> bool:
        return False

    def read_early(self, token_ids: Sequence[int], keys: Sequence[bytes], *, salt: str) -> None:
        raise AssertionError("nothing is read early on ranks")

    def advance(self) -> None:
        for transfers in self._ranks:
            transfers.advance()

    def lose_device(self, place_bytes: PlaceBytes) -> None:
        for rank, transfers in enumerate(self._ranks):
            transfers.lose_device(_bytes_of_rank(place_bytes, rank))

    def close(self) -> None:
        for transfers in self._ranks:
            transfers.close()


def _bytes_of_rank(place_bytes: PlaceBytes, rank: int) -> PlaceBytes:
    return lambda place, is_state: [place_bytes(place, is_state)[rank]]


def _give_way() -> None:
    """The calling thread gives way to others where there are more than cores; Linux has a priority for each."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
