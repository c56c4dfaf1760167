"""The directory of a running service below TMPDIR, and those that killed services have left."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

_PREFIX = "dflash-trt-serve-"
_LOCK = "lock"


@contextmanager
def state_directory() -> Iterator[Path]:
    """A private directory that lives as long as the block. First removes directories of killed services.

    A service holds a lock in its directory for as long as it lives, also in another container.
    """
    _remove_stale()
    with TemporaryDirectory(prefix=_PREFIX) as name:
        hidden = Path(name, f".{_LOCK}")
        with hidden.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            hidden.rename(Path(name, _LOCK))  # no other process sees it without an owner
            yield Path(name)


def _remove_stale() -> None:
    for path in Path(gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        directory = path.parent
        try:
            if directory.is_symlink() or directory.lstat().st_uid != os.geteuid():
                continue
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:  # its service lives, or another one removes it
            continue
