"""The library of CPU kernels, compiled once per machine into the user's cache directory.

Its name is a hash of the sources and of the flags. The compiler is no part of it, so that a cache filled where there is
a compiler serves where there is none. The file ends with a hash of what stands before, which the loader of the system
does not read: it would run a file that was cut short, or end the process by SIGBUS.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

_LOG = logging.getLogger(__name__)

_SOURCES: Final = Path(__file__).parent / "src"
_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma")
# By machine and instruction set, best first: what /proc/cpuinfo must list. The compiler uses these and no others.
_INSTRUCTION_SETS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "x86_64": {
        "avx512bf16": ("avx512_bf16", "avx512_vnni", *_AVX512),
        "avx512vnni": ("avx512_vnni", *_AVX512),
        "avx512": _AVX512,
        "avx2": ("avx2", "fma"),
    },
    "aarch64": {"neondot": ("asimd", "asimddp"), "neon": ("asimd",)},
}
_LEAST: Final = {"x86_64": "AVX2 with FMA", "aarch64": "Advanced SIMD (NEON)"}
# GCC would load ahead of the products, and copy, until a tile needs more than the 32 registers.
_NEON_FLAGS: Final = ("-fno-schedule-insns", "-fno-tree-pre")
_ARM_ARCHITECTURES: Final = {"neondot": "armv8.2-a+dotprod", "neon": "armv8-a"}
# Loops are OpenMP's, but the library names no runtime: it finds the one that PyTorch has loaded, with its threads.
# A product and a sum are fused where the code says so, and nowhere else: else bits depend on the size of a tile.
_COMPILE: Final = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fopenmp", "-Wno-maybe-uninitialized", "-c")
_LINK: Final = ("-shared", "-Wl,-z,now", "-Wl,-Bsymbolic")  # a missing symbol fails at load, not in a call
_TIME_LIMIT_S: Final = 300
_HASH_BYTES: Final = hashlib.sha256().digest_size


class UnavailableError(Exception):
    """Why there is no library here, as a sentence for the user."""


class UnsupportedCpuError(UnavailableError):
    """None is written for this CPU: nothing that a user could mend."""


def library_path(instruction_set: str | None = None) -> Path:
    """The library for this CPU (default: its best instruction set), compiled now where the cache has none.

    Raises:
        UnavailableError: this CPU, a missing compiler, a directory that cannot be written, or that others can write.
    """
    instruction_set = instruction_set or instruction_sets()[0]
    flags = _flags(instruction_set)
    path = _cache_dir() / f"cpu-kernels-{instruction_set}-{_key(flags)}.so"
    try:
        if path.parent.exists():
            _check_owner(path.parent)
        if not path.exists() or not _is_whole(path):
            _compile(path, flags)
        _check_owner(path)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be read ({error.strerror}); delete it to have it made again") from error
    return path


def instruction_sets() -> list[str]:
    """Those of this CPU, best first, at least one. Raises UnavailableError."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _INSTRUCTION_SETS:
        raise UnsupportedCpuError(
            f"they are for Linux on x86-64 and on aarch64, and this is {platform.system()} on {machine}"
        )
    found = _cpu_flags()
    names = [name for name, needed in _INSTRUCTION_SETS[machine].items() if found.issuperset(needed)]
    if not names:
        raise UnsupportedCpuError(f"this CPU has no {_LEAST[machine]}")
    return names


def has_bfloat16_tiles() -> bool:
    """AMX, with which oneDNN multiplies many rows of bfloat16 faster than vectors do."""
    return "amx_bf16" in _cpu_flags()


def _flags(instruction_set: str) -> list[str]:
    """For the compiler."""
    if instruction_set in _ARM_ARCHITECTURES:
        return [f"-march={_ARM_ARCHITECTURES[instruction_set]}", *_NEON_FLAGS]
    return [f"-m{name.replace('_', '')}" for name in _INSTRUCTION_SETS["x86_64"][instruction_set]]


def _cpu_flags() -> frozenset[str]:
    """Instructions that both the CPU and the kernel support."""
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86-64's, aarch64's
                return frozenset(value.split())
    return frozenset()


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash-trt"


def _key(flags: list[str]) -> str:
    digest = hashlib.sha256(" ".join((*_COMPILE, *_LINK, *flags)).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _is_whole(path: Path) -> bool:
    content = path.read_bytes()
    return content[-_HASH_BYTES:] == hashlib.sha256(content[:-_HASH_BYTES]).digest()


def _check_owner(path: Path) -> None:
    """Raise UnavailableError if another user could have written it: its code would run in this process."""
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        reason, hint = f"belongs to user {found.st_uid}", "set XDG_CACHE_HOME to a directory of your own"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason, hint = "can be written by other users", f"run chmod go-w {shlex.quote(str(path))}"
    else:
        return
    raise UnavailableError(f"{path} {reason}; {hint}")


def _compile(path: Path, flags: list[str]) -> None:
    """Write the library, whole or not at all, also when the machine stops."""
    compiler = _compiler()
    _LOG.info("compiling the CPU kernels into %s, once; this takes some seconds", path.parent)
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory, ThreadPoolExecutor() as pool:
            sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)  # the longest first
            objects = [Path(directory) / f"{source.stem}.o" for source in sources]
            list(pool.map(partial(_compile_one, compiler, flags), objects))
            library = Path(directory) / path.name
            _run([compiler, *_LINK, *map(str, objects), "-o", str(library)])
            _add_hash(library)
            library.replace(path)
        _flush(path.parent)
    except OSError as error:
        raise UnavailableError(f"they cannot be compiled into {path.parent} ({error})") from error


def _add_hash(library: Path) -> None:
    with library.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())
    library.chmod(0o755)
    _flush(library)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile_one(compiler: str, flags: list[str], to: Path) -> None:
    _run([compiler, *_COMPILE, *flags, str(_SOURCES / f"{to.stem}.cpp"), "-o", str(to)])


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++"):
        if name and (path := shutil.which(name)):
            return path
    raise UnavailableError("there is no C++ compiler to make them (Debian: apt install g++)")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[0]} took more than {_TIME_LIMIT_S} s") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise UnavailableError(f"{command[0]} failed: {first or f'exit code {done.returncode}'}")
