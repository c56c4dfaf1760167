"""Host tensors and PyTorch's over the same memory."""

import ctypes

import torch
from torch import Tensor

from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.core.dtype import dtype_name, num_bytes_of, torch_dtype


def host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """`tensor` must be contiguous and on the CPU; its memory lives as long as the result."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{name} is not plain host memory"
    return HostTensor(
        name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), address=tensor.data_ptr(), owner=tensor
    )


def torch_view(host: HostTensor) -> Tensor:
    """To be read alone, and no longer than `host` lives: weights may be mapped from a file."""
    memory = (ctypes.c_uint8 * (host.num_elements * num_bytes_of(host.dtype))).from_address(host.address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(torch_dtype(host.dtype)).view(host.shape)
