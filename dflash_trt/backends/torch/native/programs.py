"""Parts of a step as lists of kernel calls that one call repeats: on a CPU what a CUDA graph is on a GPU.

A part is recorded when its key comes for the second time, and is repeated from then on, on the same addresses. Only the
calls are repeated: while a part is recorded, PyTorch may make views and empty tensors, and nothing else.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.torch.native.library import Arguments, Call, CpuKernels
from dflash_trt.core.array import Array

R = TypeVar("R")

_MAX_BYTES: Final = 64 << 20  # of all programs
_ALIGNMENT_BYTES: Final = 64
_FREE_REFERENCES: Final = 3  # of a block that only the list, a loop and the call that counts know


class UnrecordableError(Exception):
    """PyTorch would compute a part of the part."""


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, new tensors get memory of its own, which serves again when they are gone.

    Raises UnrecordableError for operators that compute.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler, which takes a second, in order to leave this class out."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: list[Array] = []

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.empty.memory_format:
            return self._empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if function._schema.is_mutable:
            raise UnrecordableError(str(function))
        result = function(*args, **kwargs)
        given = {_address(x) for x in args if isinstance(x, Tensor)}
        if any(_address(x) not in given for x in ([result] if isinstance(result, Tensor) else result)):
            raise UnrecordableError(str(function))
        return result

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape))
        num_bytes = count * dtype.itemsize + _ALIGNMENT_BYTES
        free = [block for block in self.blocks if sys.getrefcount(block) == _FREE_REFERENCES]
        block = min((block for block in free if block.nbytes >= num_bytes), key=lambda x: x.nbytes, default=None)
        if block is None:
            block = np.empty(num_bytes, np.uint8)
            self.blocks.append(block)
        start = -block.ctypes.data % _ALIGNMENT_BYTES
        return torch.frombuffer(block, dtype=dtype, count=count, offset=start).view(tuple(shape))


def _address(x: Tensor) -> int | None:
    """Of its storage; None of oneDNN's layouts, which have none."""
    return None if x.is_mkldnn else x.untyped_storage().data_ptr()


@dataclass(frozen=True, kw_only=True, slots=True)
class Program(Generic[R]):
    """Keeps all that its calls have addresses of, except weights, pages and inputs."""

    result: R
    calls: ctypes.Array[Call]
    arguments: list[Arguments]
    memory: Memory


class Programs:
    """The programs of one executor. Results are valid until the same key is run again."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._seen: set[Hashable] = set()
        self._unrecordable: set[Hashable] = set()
        self._programs: OrderedDict[Hashable, Program[Any]] = OrderedDict()  # the latest used last

    def run(self, key: Hashable, compute: Callable[[], R]) -> R:
        """`compute()`, whose calls and views depend on the key alone. A part of a recorded part is none of its own."""
        if self._kernels.recorder.calls is not None:
            return compute()
        found: Program[R] | None = self._programs.get(key)
        if found is not None:
            self._programs.move_to_end(key)
            self._kernels.run(found.calls)
            return found.result
        if key not in self._seen or key in self._unrecordable:
            self._seen.add(key)
            return compute()
        try:
            program = self._recorded(compute)
        except UnrecordableError:
            self._unrecordable.add(key)
            return compute()
        self._programs[key] = program
        while sum(each.memory.num_bytes for each in self._programs.values()) > _MAX_BYTES:
            self._programs.popitem(last=False)
        return program.result

    def _recorded(self, compute: Callable[[], R]) -> Program[R]:
        """Computes, too."""
        memory, arguments = Memory(), list[Arguments]()
        self._kernels.recorder.calls = arguments
        try:
            with memory:
                result = compute()
        finally:
            self._kernels.recorder.calls = None
        calls = self._kernels.calls(arguments)
        return Program(result=result, calls=calls, arguments=arguments, memory=memory)
