"""A lock file next to an output path, so that one build at a time writes to it.

The lock is the kernel's (flock) and ends with its process, so files of a build that left no lock can be removed.
"""

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.core.errors import BuildError

_MAX_HOLDER_BYTES = 256


@contextmanager
def output_lock(output: Path) -> Iterator[None]:
    """Lock `output` against other builds.

    Raises:
        BuildError: another build holds it.
        OSError: the lock file cannot be made.
    """
    path = output.parent / f".{output.name}.lock"
    descriptor = _acquire(path, output)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock ends: `_acquire` of another build then sees that it is gone
        os.close(descriptor)


def sibling(output: Path, purpose: str) -> Path:
    """A new hidden path next to the output; `purpose` is "tmp" or "old"."""
    return output.parent / f".{output.name}.{purpose}-{secrets.token_hex(4)}"


def clear_leftovers(output: Path, *, warn: Callable[[str], None]) -> None:
    """Remove files that killed builds left next to the output. The caller holds the lock.

    After a build that was killed between its two renames, the previous engine is restored.
    """
    for path in _leftovers(output, "old"):
        if output.exists():
            _remove(path, warn)
        else:
            path.rename(output)
            warn(f"restored {output}, which a killed build had moved to {path}")
    for path in _leftovers(output, "tmp"):
        _remove(path, warn)


def _leftovers(output: Path, purpose: str) -> list[Path]:
    name = re.compile(rf"\.{re.escape(output.name)}\.{purpose}-[0-9a-f]{{8}}")
    siblings = sorted(path for path in output.parent.iterdir() if name.fullmatch(path.name))
    return [path for path in siblings if path.is_dir() and not path.is_symlink()]


def _remove(path: Path, warn: Callable[[str], None]) -> None:
    shutil.rmtree(path)
    warn(f"removed {path}, left by a killed build")


def _acquire(path: Path, output: Path) -> int:
    """Open and lock the file that is at `path` now; return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, _MAX_HOLDER_BYTES).decode(errors="replace") or "an unknown process"
            os.close(descriptor)
            found = f"another build that is writing it ({holder})"
            hint = "Wait for it, or choose another -o."
            raise BuildError.about(f"output {output}", expected="one build", found=found, hint=hint) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous build has just unlinked this file, so its lock has no effect


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
