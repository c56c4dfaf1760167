"""Blocks of the prefix cache from the memory of one process to that of another, over NVIDIA's NIXL.

A sender copies its blocks into memory that it has registered, and tells who waits for a prompt where they are. A
receiver reads them there: by RDMA where UCX finds a network for it, else over TCP, or shared memory on one machine. The
sender holds a block while somebody may read it. Then newer blocks take its place: one that was overwritten, or did not
come, has not its checksum, and is a miss.

Source: nixl_cu13/_api.py of NIXL 1.5, whose agents are used by one thread at a time, and make no progress on their own.
"""

import ctypes
import logging
import mmap
import os
import threading
import time
import uuid
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from dflash_trt.core.errors import ConfigError
from dflash_trt.scheduler.stored_prefixes import Block

_NUM_LANDINGS: Final = 8  # blocks that a receiver reads at once
_ROOM_S: Final = 10.0  # a block waits so long for those before it to be read
_READ_S: Final = 10.0
_LINGER_S: Final = 60.0  # a sender answers late readers after the last watch
_POLL_S: Final = 0.0005

_LOG = logging.getLogger(__name__)

Tell = Callable[[Sequence["RemoteBlock"]], None]
_Name = tuple[bytes, bool]  # of a block


class RemoteBlock(NamedTuple):
    """A block in a sender's memory; JSON has it as a list."""

    key: str  # hexadecimal
    is_state: bool
    groups: int
    address: int
    num_bytes: int
    checksum: int  # CRC-32

    @property
    def block(self) -> Block:
        return Block(key=bytes.fromhex(self.key), is_state=self.is_state, groups=self.groups)


def check_nixl() -> None:
    """Raises ConfigError without NIXL, which is an extra."""
    if find_spec("nixl_cu13") is None:
        hint = "Install it with: pip install 'dflash-trt[nixl]'"
        raise ConfigError.about("NIXL", expected="the packages of the extra 'nixl'", found="no nixl_cu13", hint=hint)


class BlockSender:
    """Implements PrefixStore for a process that sends its blocks and reads none. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` of memory for blocks; networks with RDMA lock it."""
        self._memory = _Memory(num_bytes)
        self._ring = _Ring(num_bytes)
        self._there: dict[_Name, RemoteBlock] = {}
        self._watches: list[tuple[Collection[bytes], Tell]] = []
        self._wanted: Counter[bytes] = Counter()  # keys in watches
        self._changed = threading.Condition()  # guards everything above
        self._until_s = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="dflash-nixl", daemon=True)
        self._thread.start()

    @property
    def metadata(self) -> bytes:
        """What a receiver needs to reach this memory."""
        return self._memory.metadata

    def watch(self, keys: Collection[bytes], tell: Tell) -> Callable[[], None]:
        """Hold the blocks of these keys, and tell of each that is there or comes, until the result is called.

        `tell` is called under a lock, in the thread that writes: it must be quick.
        """
        watch = frozenset(keys), tell
        with self._changed:
            self._watches.append(watch)
            self._wanted.update(watch[0])
            there = [block for (key, _), block in self._there.items() if key in watch[0]]
            if there:
                tell(there)
            self._changed.notify_all()
        return partial(self._end, watch)

    def knows(self, block: Block) -> bool:
        with self._changed:
            there = self._there.get(block.name)
        return there is not None and not block.groups & ~there.groups

    def find(self, key: bytes) -> list[Block]:
        return []

    def read(self, block: Block, parts: Sequence[memoryview]) -> bool:
        return False

    def write(self, block: Block, parts: Sequence[bytes]) -> bool:
        """Waits while blocks that others wait for fill the memory; False after ten seconds."""
        content = b"".join(parts)
        with self._changed:
            offset = self._take(block, len(content))
            deadline_s = time.monotonic() + _ROOM_S
            while offset is None and (left_s := deadline_s - time.monotonic()) > 0 and not self._is_closed:
                self._changed.wait(left_s)
                offset = self._take(block, len(content))
        if offset is None:
            return False
        self._memory.fill(offset, content)
        address, checksum = self._memory.address + offset, zlib.crc32(content)
        remote = RemoteBlock(block.key.hex(), block.is_state, block.groups, address, len(content), checksum)
        with self._changed:
            self._there[block.name] = remote
            for keys, tell in self._watches:
                if block.key in keys:
                    tell([remote])
            self._changed.notify_all()
        return True

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._memory.close()

    def _take(self, block: Block, size: int) -> int | None:
        """The offset of a range for the block, which is held until it is there."""
        in_the_way = self._ring.in_the_way(block.name, size)
        if in_the_way is None or any(self._is_held(other, block.name) for other in in_the_way):
            return None
        for name in in_the_way:
            self._there.pop(name, None)
        return self._ring.take(block.name, size, in_the_way)

    def _is_held(self, name: _Name, newer: _Name) -> bool:
        """Its bytes are to come, or somebody may read them and `newer` is another block."""
        return name not in self._there or (name != newer and name[0] in self._wanted)

    def _end(self, watch: tuple[Collection[bytes], Tell]) -> None:
        with self._changed:
            self._watches.remove(watch)
            self._wanted.subtract(watch[0])
            self._wanted = +self._wanted
            self._until_s = time.monotonic() + _LINGER_S
            self._changed.notify_all()

    def _serve(self) -> None:
        """Networks without RDMA need this side, too."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._watches or time.monotonic() < self._until_s)
                if self._is_closed:
                    return
            self._memory.progress()
            time.sleep(_POLL_S)


class BlockReceiver:
    """Implements PrefixStore for a process that reads what others send, and keeps nothing there. Thread-safe."""

    def __init__(self, max_block_bytes: int) -> None:
        self._memory = _Memory(_NUM_LANDINGS * max_block_bytes)
        self._landings: SimpleQueue[int] = SimpleQueue()  # offsets
        for index in range(_NUM_LANDINGS):
            self._landings.put(index * max_block_bytes)
        self._known: OrderedDict[_Name, _Known] = OrderedDict()  # the oldest first
        self._lock = threading.Lock()  # guards the one above

    def learn(self, metadata: bytes, blocks: Sequence[RemoteBlock]) -> None:
        """A sender has told of its metadata and blocks. They are forgotten when it may have overwritten them."""
        sender, now = self._memory.add_sender(metadata), time.monotonic()
        with self._lock:
            while self._known and next(iter(self._known.values())).until_s < now:
                self._known.popitem(last=False)
            for remote in blocks:
                name = remote.block.name
                self._known[name] = _Known(remote, sender, now + _LINGER_S)
                self._known.move_to_end(name)

    def knows(self, block: Block) -> bool:
        """True, so that nothing is written."""
        return True

    def find(self, key: bytes) -> list[Block]:
        now = time.monotonic()
        with self._lock:
            found = [self._known.get((key, is_state)) for is_state in (False, True)]
        return [known.remote.block for known in found if known is not None and now < known.until_s]

    def read(self, block: Block, parts: Sequence[memoryview]) -> bool:
        with self._lock:
            known = self._known.get(block.name)
        if known is None or known.remote.num_bytes != sum(len(part) for part in parts):
            return False
        try:
            offset = self._landings.get(timeout=_READ_S)
        except Empty:
            return False
        if not self._memory.read(known.sender, known.remote, offset):
            self._lose(known.sender)
            return False  # what is still on its way may land there
        content = memoryview(self._memory.bytes)[offset : offset + known.remote.num_bytes]
        is_whole = zlib.crc32(content) == known.remote.checksum
        for part in parts if is_whole else ():
            part[:] = content[: len(part)]
            content = content[len(part) :]
        self._landings.put(offset)
        return is_whole

    def write(self, block: Block, parts: Sequence[bytes]) -> bool:
        return False

    def close(self) -> None:
        self._memory.close()

    def _lose(self, sender: str) -> None:
        """It may have died: nobody waits for it again."""
        _LOG.warning("a prefill worker does not answer: its blocks are computed here")
        with self._lock:
            for name in [name for name, known in self._known.items() if known.sender == sender]:
                del self._known[name]
        self._memory.remove_sender(sender)


class _Known(NamedTuple):
    remote: RemoteBlock
    sender: str
    until_s: float


class _Ring:
    """Ranges of a memory, by name: each begins after the newest, or at the start, and ends what was there."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._ranges: OrderedDict[_Name, tuple[int, int]] = OrderedDict()  # start and end, the oldest first
        self._end = 0  # of the newest

    def in_the_way(self, name: _Name, size: int) -> list[_Name] | None:
        """Whose ranges end where `name` gets one of this size; None if it is larger than the memory."""
        if size > self._num_bytes:
            return None
        start = self._start(size)
        found = [name] if name in self._ranges else []
        for other, (first, last) in self._ranges.items():
            is_passed = start != self._end <= first
            is_in_the_way = is_passed or (first < start + size and start < last)
            if other == name:
                continue
            if not is_in_the_way:
                break
            found.append(other)
        return found

    def take(self, name: _Name, size: int, in_the_way: Sequence[_Name]) -> int:
        """The start of the range."""
        for other in in_the_way:
            self._ranges.pop(other, None)
        start = self._start(size)
        self._ranges[name] = start, start + size
        self._end = start + size
        return start

    def _start(self, size: int) -> int:
        return self._end if self._end + size <= self._num_bytes else 0


class _Memory:
    """Registered memory, and the agent that has registered it. Thread-safe but for the bytes."""

    def __init__(self, num_bytes: int) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        self.bytes = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self._lock = threading.Lock()  # one call of the agent at a time
        config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent: Any = nixl_agent(f"dflash-{uuid.uuid4().hex}", config)  # its progress thread takes a core
        self._registered = self._agent.register_memory([(self.address, num_bytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._senders: dict[bytes, str] = {}  # names by metadata

    def fill(self, offset: int, content: bytes) -> None:
        self.bytes[offset : offset + len(content)] = content

    def add_sender(self, metadata: bytes) -> str:
        """Its name."""
        with self._lock:
            if metadata not in self._senders:
                name = self._agent.add_remote_agent(metadata)
                self._senders[metadata] = name if isinstance(name, str) else name.decode()
            return self._senders[metadata]

    def remove_sender(self, name: str) -> None:
        with self._lock, suppress(Exception):  # it is gone, one way or the other
            self._senders = {data: other for data, other in self._senders.items() if other != name}
            self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        with self._lock:
            self._agent.get_new_notifs()

    def read(self, sender: str, remote: RemoteBlock, offset: int) -> bool:
        """Read a block of another agent's to `offset`; False if it has not come in time."""
        try:
            with self._lock:
                to = self._agent.get_xfer_descs([(self.address + offset, remote.num_bytes, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(remote.address, remote.num_bytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", to, there, sender)
                state = self._agent.transfer(handle)
            deadline_s = time.monotonic() + _READ_S
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            with self._lock:
                self._agent.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - NIXL's errors have no class in common
            _LOG.debug("NIXL failed", exc_info=True)
            return False
        return bool(state == "DONE")

    def close(self) -> None:
        with self._lock, suppress(Exception):
            self._agent.deregister_memory(self._registered)
        self._agent = None
