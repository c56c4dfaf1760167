"""A driver of Triton that compiles for a GPU and runs the PTX on the CPU, over CPU tensors.

`install(architecture)` before a kernel is launched. TRITON_INTERPRET must not be set.
"""

import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import compiler

from software_gpu.ptx.library import PtxKernel

_SHARED_BYTES = 227 * 1024
_NUM_MULTIPROCESSORS = 3


@dataclass(kw_only=True)
class SoftwareGpu:
    """`is_late`, `finds_races`: see PtxKernel.launch."""

    architecture: int = 90
    is_late: bool = True
    finds_races: bool = False
    launches: Counter[str] = field(default_factory=Counter)  # by kernel
    kernels: dict[str, PtxKernel] = field(default_factory=dict)  # by the hash of what was compiled


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": _SHARED_BYTES,
            "multiprocessor_count": _NUM_MULTIPROCESSORS,
            "warpSize": 32,
            "max_num_regs": 65536,
            "sm_clock_rate": 1,
            "mem_clock_rate": 1,
            "mem_bus_width": 1,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[str, str, int, int, int]:
        return "module", name, 32, 0, 1024

    def unload_module(self, module: object) -> None:
        pass


class _Launcher:
    def __init__(self, gpu: SoftwareGpu, src: Any, metadata: Any) -> None:
        self._gpu, self._metadata = gpu, metadata
        self._types = list(src.signature.values())

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        """`rest`: six of Triton's own, then what the kernel is called with."""
        kernel = self._gpu.kernels[self._metadata.hash]
        self._gpu.launches[self._metadata.name] += 1
        if not x * y * z:
            return
        values = list(_flat(rest[6:], self._types))
        values += [0] * (len(kernel.parameters) - len(values))  # Triton's scratch memory
        kernel.launch(
            (x, y, z),
            32 * self._metadata.num_warps,
            self._metadata.shared,
            _packed(values, kernel.parameters),
            allocations=_allocations(values),
            is_late=self._gpu.is_late,
            finds_races=self._gpu.finds_races,
        )


class _Driver(DriverBase):
    def __init__(self, gpu: SoftwareGpu) -> None:
        self._gpu = gpu
        self.utils = _Utils()
        self.launcher_cls = partial(_Launcher, gpu)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_device_interface(self) -> Any:
        return torch.cuda


def install(**settings: Any) -> SoftwareGpu:
    """Make this GPU Triton's for the rest of the process; see SoftwareGpu for its settings."""
    gpu = SoftwareGpu(**settings)
    os.environ["TRITON_INTERPRET"] = "0"
    make = compiler.CompiledKernel.__init__

    def keep_ptx(compiled: Any, *args: Any, **options: Any) -> None:
        make(compiled, *args, **options)
        gpu.kernels[compiled.metadata.hash] = PtxKernel(compiled.asm["ptx"], compiled.metadata.name)

    compiler.CompiledKernel.__init__ = keep_ptx
    triton.runtime.driver.set_active(_Driver(gpu))
    return gpu


def _flat(bound: Sequence[Any], types: Sequence[Any]) -> Iterator[Any]:
    """The run-time arguments: constants are compiled in, tuples are taken apart."""
    for value, kind in zip(bound, types, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(value, kind)
        elif kind != "constexpr":
            yield 0 if value is None else value


def _packed(values: Sequence[Any], places: Sequence[tuple[int, int]]) -> bytes:
    """The block of parameters; a place is an offset and bytes."""
    block = bytearray(sum(places[-1]))
    for (offset, size), value in zip(places, values, strict=True):
        if isinstance(value, float):
            content = struct.pack("<d" if size == 8 else "<f", value)
        else:
            number = value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
            content = number.to_bytes(size, "little", signed=number < 0)
        block[offset : offset + size] = content
    return bytes(block)


def _allocations(values: Sequence[Any]) -> list[tuple[int, int]]:
    """What a launch may touch: its tensors, and all of this process's memory where one of them holds addresses."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    allowed = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
    numbers = [tensor for tensor in tensors if tensor.dtype == torch.int64 and tensor.numel()]
    if not numbers:
        return allowed
    mapped = _mapped_memory()
    begins, ends = torch.tensor(mapped).T.contiguous()
    for tensor in numbers:
        found = torch.searchsorted(begins, tensor.flatten(), right=True) - 1
        if ((found >= 0) & (tensor.flatten() < ends[found])).any():
            return mapped
    return allowed


def _mapped_memory() -> list[tuple[int, int]]:
    """Ranges that this process may write, in rising order; see proc_pid_maps(5)."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[1].startswith("rw")]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges if int(end, 16) < 2**63]
