"""The CPU kernels in every instruction set: this machine's, AVX-512 in portable C++, and aarch64 under an emulator.

Where the CPU has no AVX-512, its instructions are functions of avx512/immintrin.h.

The emulator of aarch64 runs one process beside this one. Its kernels get the addresses of this process: a page that
they touch is copied there, and what they changed of it is copied back after the call. So all tests of the kernels run
on them, too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import pytest

from dflash_trt.backends.torch.native import library
from dflash_trt.backends.torch.native.build import UnavailableError, instruction_sets, library_path
from dflash_trt.backends.torch.native.library import CpuKernels, load_kernels

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
MISSING = [tool for tool in (COMPILER, EMULATOR, "setarch") if shutil.which(tool) is None]
NEEDS_ARM = pytest.mark.skipif(
    bool(MISSING), reason=f"no {', '.join(MISSING)} (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
)
_PAGE = 4096
ARM_SETS = ("neondot", "neon")
_SIMULATION = Path(__file__).with_name("avx512").absolute()
# A library takes some 40 s to compile: CI has the one with the most instructions.
_SIMULATED: dict[str, Any] = {"avx512bf16": (), "avx512vnni": pytest.mark.slow, "avx512": pytest.mark.slow}


def kernel_sets() -> list[Any]:
    """Parameters for `kernels_of`."""
    try:
        own = instruction_sets()
    except UnavailableError:
        return []
    if "neon" in own:
        return own
    simulated = [pytest.param(name, marks=marks) for name, marks in _SIMULATED.items() if name not in own]
    return [*own, *simulated, *(pytest.param(name, marks=NEEDS_ARM) for name in ARM_SETS)]


@contextmanager
def kernels_of(instruction_set: str) -> Iterator[CpuKernels]:
    if instruction_set in instruction_sets():
        yield load_kernels(library_path(instruction_set))
        return
    if instruction_set.startswith("avx512"):
        yield load_kernels(simulated_library(instruction_set))
        return
    path = arm_library(instruction_set)
    with Emulator(path) as emulator:
        with mock.patch.object(library.ctypes, "CDLL", return_value=emulator):
            kernels = load_kernels(path)
        yield kernels


def simulated_library(instruction_set: str) -> Path:
    """In a cache of its own: its name is that of the library for a CPU that has these instructions."""
    version = crc32((_SIMULATION / "immintrin.h").read_bytes())
    cache = Path("build/test_cpu_kernels", f"{version:08x}").absolute()
    with mock.patch.dict(os.environ, CXX=str(_SIMULATION / "c++"), XDG_CACHE_HOME=str(cache)):
        return library_path(instruction_set)


def arm_library(instruction_set: str) -> Path:
    """As an Arm machine compiles it."""
    with mock.patch.dict(os.environ, CXX=COMPILER):
        return library_path(instruction_set)


class Emulator:
    """In the place of a ctypes.CDLL: functions of the library of aarch64."""

    def __init__(self, library: Path) -> None:
        with tempfile.TemporaryDirectory() as directory:
            guest = Path(directory) / "guest"
            # OpenMP's runtime, which PyTorch brings on an Arm machine.
            link = ("-fopenmp", "-Wl,--no-as-needed", "-o", guest)
            subprocess.run([COMPILER, "-O2", Path(__file__).with_name("arm_guest.cpp"), *link], check=True)
            self._process = subprocess.Popen(
                # In the layout of -L the emulator's own memory lies far from that of this process.
                ["setarch", "-L", EMULATOR, "-L", ROOT, guest, library],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_WAIT_POLICY": "passive"},
            )
            self._memory, self._lock = os.open("/proc/self/mem", os.O_RDONLY), Lock()
            self._dlsym, self._library = struct.unpack("<2Q", self._receive(16))

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._memory)
        with self._process:
            self._process.kill()

    def __getattr__(self, name: str) -> Function:
        text = ctypes.create_string_buffer(name.encode())
        address = self.call(self._dlsym, self._library, ctypes.addressof(text))
        if address == 0:
            raise AttributeError(name)
        return Function(self, address)

    def call(self, function: int, *arguments: int) -> int:
        with self._lock:
            self._send(struct.pack("<7Q", function, *arguments, *[0] * (6 - len(arguments))))
            pages = {}
            while (address := struct.unpack("<Q", self._receive(8))[0]) != 0:
                pages[address] = os.pread(self._memory, _PAGE, address)
                self._send(pages[address])
            (result,) = struct.unpack("<Q", self._receive(8))
            for address, before in pages.items():
                if (after := self._receive(_PAGE)) != before:
                    _write_changes(address, before, after)
            return int(result)

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        content = self._process.stdout.read(size)
        assert len(content) == size, f"the emulator ended with {self._process.wait()}"
        return content


def _write_changes(address: int, before: bytes, after: bytes) -> None:
    """Other bytes of the page may be Python's own, which have changed since."""
    here = np.frombuffer((ctypes.c_uint8 * _PAGE).from_address(address), np.uint8)
    old, new = (np.frombuffer(page, np.uint8) for page in (before, after))
    here[old != new] = new[old != new]


class Function:
    """In the place of a function of a ctypes.CDLL."""

    argtypes: tuple[Any, ...] = ()
    restype: Any = ctypes.c_int32

    def __init__(self, emulator: Emulator, address: int) -> None:
        self._emulator, self._as_parameter_ = emulator, ctypes.c_void_p(address)

    def __call__(self, *arguments: Any) -> Any:
        given = (x if isinstance(x, int) else ctypes.addressof(x._obj) for x in arguments)
        result = self._emulator.call(self._as_parameter_.value or 0, *given)
        return None if self.restype is None else self.restype(result).value
