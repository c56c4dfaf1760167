"""Memory that an address of a network or an engine names."""

import ctypes

import torch
from torch import Tensor


def view_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory as a tensor."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
