"""A directory of prefix blocks, one file each, that engines of the same kind may share.

    DIR/<what the blocks are for>/<2 digits of the key>/<key>.pages, or .state

A file is a header and the bytes of a block's place, of one rank after another. It appears whole, under its name, by a
rename. The header has their checksum: a file that was cut, damaged or written by something else is as good as none.
"""

import contextlib
import io
import os
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from dflash_trt.core.runtime_config import SettingError
from dflash_trt.scheduler.stored_prefixes import Block

_MAGIC = b"DFP1"
_HEADER = struct.Struct("<4sIQI")  # magic, groups, bytes that follow, their CRC-32
_UNFINISHED_S = 3600.0  # nobody writes for so long
_SUFFIXES = {False: ".pages", True: ".state"}


class PrefixDirectory:
    """Files of at most `max_bytes` in all, as far as this process knows them; the least recently used go first.

    Thread-safe. Whatever fails is a miss: no method raises OSError but the constructor.
    """

    def __init__(self, directory: Path, *, name: str, max_bytes: int | None = None) -> None:
        """`name` is what the blocks are for. `max_bytes` None is half of what is free, and of what is there already."""
        self._root = directory / name
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, _File] = OrderedDict()  # least recently used first
        found = []
        for path in self._root.glob("??/*.*"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                found.append((path.stat().st_mtime_ns, path, _known(path)))
        self._files.update((path, file) for _, path, file in sorted(found))
        _remove_unfinished(self._root)
        self._num_bytes = sum(file.size for file in self._files.values())
        self._max_bytes = max_bytes or (shutil.disk_usage(self._root).free + self._num_bytes) // 2

    @classmethod
    def open(cls, directory: Path, *, name: str, max_bytes: int | None) -> Self:
        """Raises SettingError for a directory that cannot be used."""
        try:
            return cls(directory, name=name, max_bytes=max_bytes)
        except OSError as error:
            hint = "Name one that this user may write to."
            found = f"{error.strerror}: {error.filename}"
            raise SettingError("disk_cache_dir", expected="a directory", found=found, hint=hint) from error

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def knows(self, block: Block) -> bool:
        """True if this process has written or seen the block, with all of its groups; it may have gone since."""
        file = self._files.get(self._path(block.key, is_state=block.is_state))
        return file is not None and not block.groups & ~file.groups

    def find(self, key: bytes) -> list[Block]:
        """Blocks of a key whose files are there."""
        found = []
        for is_state in _SUFFIXES:
            path = self._path(key, is_state=is_state)
            try:
                with path.open("rb") as file:
                    header = _header(file.read(_HEADER.size))
            except OSError:
                self._forget(path)
                continue
            if header is not None:
                found.append(Block(key=key, is_state=is_state, groups=header[0]))
        return found

    def read(self, block: Block, parts: Sequence[memoryview]) -> bool:
        """Fill the parts with the block's bytes; False, with anything in them, if the file is not as it was written."""
        path = self._path(block.key, is_state=block.is_state)
        try:
            with path.open("rb", buffering=0) as file:
                header = _header(file.read(_HEADER.size))
                is_whole = header is not None and header[:2] == (block.groups, _num_bytes(parts))
                is_whole = is_whole and all(_fill(file, part) for part in parts) and not file.read(1)
        except OSError:
            return False
        if not is_whole or header is None or header[2] != _checksum(parts):
            self._remove(path)
            return False
        with contextlib.suppress(OSError):
            os.utime(path)
        self._note(path, _File(_HEADER.size + _num_bytes(parts), block.groups))
        return True

    def write(self, block: Block, parts: Sequence[bytes]) -> bool:
        """Keep a block; False if that failed."""
        path = self._path(block.key, is_state=block.is_state)
        size = _HEADER.size + _num_bytes(parts)
        if size > self._max_bytes:
            return False
        self._make_room(size)
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._root, prefix=".")
            try:
                with open(descriptor, "wb") as file:
                    file.write(_HEADER.pack(_MAGIC, block.groups, _num_bytes(parts), _checksum(parts)))
                    file.writelines(parts)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError:
            return False
        self._note(path, _File(size, block.groups))
        return True

    def _path(self, key: bytes, *, is_state: bool) -> Path:
        name = key.hex()
        return self._root / name[:2] / f"{name}{_SUFFIXES[is_state]}"

    def _note(self, path: Path, file: "_File") -> None:
        """A file was written or used."""
        with self._lock:
            self._drop(path)
            self._files[path] = file
            self._num_bytes += file.size

    def _make_room(self, size: int) -> None:
        while True:
            with self._lock:
                if self._num_bytes + size <= self._max_bytes or not self._files:
                    return
                oldest = next(iter(self._files))
            self._remove(oldest)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._drop(path)

    def _remove(self, path: Path) -> None:
        self._forget(path)
        with contextlib.suppress(OSError):
            path.unlink()

    def _drop(self, path: Path) -> None:
        file = self._files.pop(path, None)
        self._num_bytes -= 0 if file is None else file.size


class _File(NamedTuple):
    size: int
    groups: int


def _known(path: Path) -> _File:
    with path.open("rb") as file:
        header = _header(file.read(_HEADER.size))
    return _File(path.stat().st_size, 0 if header is None else header[0])


def _remove_unfinished(root: Path) -> None:
    """Files of processes that were killed while they wrote."""
    for path in root.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                path.unlink()


def _header(content: bytes) -> tuple[int, int, int] | None:
    """Groups, bytes that follow, their checksum; None of anything else."""
    if len(content) != _HEADER.size:
        return None
    magic, groups, num_bytes, checksum = _HEADER.unpack(content)
    return (groups, num_bytes, checksum) if magic == _MAGIC else None


def _num_bytes(parts: Sequence[bytes | memoryview]) -> int:
    return sum(len(part) for part in parts)


def _fill(file: io.FileIO, part: memoryview) -> bool:
    while len(part):
        count = file.readinto(part)
        if not count:
            return False
        part = part[count:]
    return True


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value
