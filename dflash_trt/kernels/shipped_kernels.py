"""Kernels compiled on another machine: made there without a GPU, and found here before Triton compiles them.

Triton's own cache on the disk gets no kernel of them: what an engine directory brings stays in the processes that open
it. Triton's name of a kernel is a hash of its source, constants and options, of the bytes of the compiler and of
TRITON_* variables (`get_cache_key` in triton/runtime/cache.py), and says nothing of paths or of a GPU.
"""

import hashlib
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import FileCacheManager, triton_key

from dflash_trt.core.kernel_archive import KernelArchive, KernelIndex, is_kernel_file
from dflash_trt.kernels.compiling import active_architecture


class _CompilerOnly:
    """Triton's driver in a process that compiles and never launches."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(architecture: str) -> None:
    """From now on, launches of this process compile for "sm_90a" and the like. TRITON_INTERPRET must not be set."""
    triton.runtime.driver.set_active(_CompilerOnly(int(architecture.removeprefix("sm_").removesuffix("a"))))


def pack_kernels(cache_dir: Path) -> KernelArchive:
    """All kernels of a Triton cache."""
    paths = sorted(path for path in cache_dir.glob("*/*") if path.is_file())
    files = {path.relative_to(cache_dir).as_posix(): path.read_bytes() for path in paths}
    files = {name: content for name, content in files.items() if is_kernel_file(name)}
    return KernelArchive(_index(sum(name.endswith(".cubin") for name in files)), files)


def local_architecture() -> str:
    """The name of what this process compiles for, as "sm_90a"."""
    return f"sm_{active_architecture()}a"


def use_kernels(archive: KernelArchive) -> None:
    """Have Triton find these kernels in this process; the others stay where its cache keeps them.

    Raises:
        ValueError: they were compiled by another Triton or from other sources; the message says what was found.
    """
    index = archive.index
    if index.compiler_sha256 != _compiler_sha256():
        raise ValueError(f"compiled by another Triton ({index.triton_version}; this one is {triton.__version__})")
    if index.sources_sha256 != _sources_sha256():
        raise ValueError("compiled from the kernels of another version of dflash-trt")
    directory = tempfile.TemporaryDirectory(prefix="dflash-trt-kernels-")
    groups: dict[str, dict[str, str]] = {}
    for name, content in archive.files.items():
        path = Path(directory.name) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        groups.setdefault(path.parent.name, {})[path.name] = str(path)
    make = triton.knobs.cache.manager_class or FileCacheManager
    triton.knobs.cache.manager_class = partial(_shipped_first, make, groups, directory)


def _shipped_first(
    make: Callable[..., Any],
    groups: dict[str, dict[str, str]],
    directory: object,  # lives as long as this is Triton's
    key: str,
    **modes: bool,
) -> Any:
    """The manager of one kernel's files, as Triton's `get_cache_manager` makes it."""
    manager = make(key, **modes)
    if key in groups and not modes:
        manager.get_group = lambda name: groups[key]
    return manager


def _index(num_kernels: int) -> KernelIndex:
    return KernelIndex(
        triton_version=triton.__version__,
        compiler_sha256=_compiler_sha256(),
        sources_sha256=_sources_sha256(),
        num_kernels=num_kernels,
    )


def _compiler_sha256() -> str:
    """Of Triton's Python and its library, which differs by the version of Python."""
    return hashlib.sha256(triton_key().encode()).hexdigest()


@cache
def _sources_sha256() -> str:
    """Of this package, which has the kernels and what launches them."""
    hashes = [hashlib.sha256(path.read_bytes()).digest() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(hashes)).hexdigest()
