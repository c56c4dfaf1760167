"""A weight before any backend has read it: its place in host memory, its dtype and shape.

Neither torch nor TensorRT is needed here. Nothing is copied: `owner` keeps the memory alive, so the HostTensor does.
"""

import ctypes
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dflash_trt.core.dtype import DType, num_bytes_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTensor:
    """Contiguous, in C order, at byte `address`. `name` is the canonical name, for errors and layer names."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    address: int
    owner: object = field(repr=False, compare=False)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def rows(self, start: int, stop: int) -> "HostTensor":
        """Rows start .. stop - 1 of axis 0, in the same memory."""
        assert 0 <= start < stop <= self.shape[0], f"{self.name}: no rows {start}..{stop} in {self.shape}"
        row_bytes = math.prod(self.shape[1:]) * num_bytes_of(self.dtype)
        return replace(
            self,
            name=f"{self.name}[{start}:{stop}]",
            shape=(stop - start, *self.shape[1:]),
            address=self.address + start * row_bytes,
        )

    def floats(self) -> tuple[float, ...]:
        """The values of a small float32 tensor, such as the scales of a quantized weight."""
        assert self.dtype == "float32", f"{self.name} is {self.dtype}"
        return tuple((ctypes.c_float * self.num_elements).from_address(self.address))


def host_floats(name: str, values: list[float], shape: tuple[int, ...]) -> HostTensor:
    """A new float32 tensor that owns its memory."""
    memory = (ctypes.c_float * len(values))(*values)
    return _owned(name, "float32", memory, shape)


def host_array(name: str, values: "np.ndarray[Any, np.dtype[np.float32 | np.int32]]") -> HostTensor:
    """A tensor in the memory of a contiguous numpy array."""
    dtype: DType = "int32" if values.dtype == np.int32 else "float32"
    return HostTensor(name=name, dtype=dtype, shape=values.shape, address=values.ctypes.data, owner=values)


def host_ints(name: str, values: list[int], shape: tuple[int, ...], dtype: Literal["int32", "int64"]) -> HostTensor:
    """A new integer tensor that owns its memory."""
    element = ctypes.c_int32 if dtype == "int32" else ctypes.c_int64
    return _owned(name, dtype, (element * len(values))(*values), shape)


def _owned(name: str, dtype: DType, memory: Any, shape: tuple[int, ...]) -> HostTensor:
    return HostTensor(name=name, dtype=dtype, shape=shape, address=ctypes.addressof(memory), owner=memory)
