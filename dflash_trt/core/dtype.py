"""The only table of dtypes: the size of each, and its name in every file format and library.

Everywhere else a dtype is its PyTorch name. PyTorch itself is imported only where a torch.dtype is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, cast

if TYPE_CHECKING:
    import torch

FloatDType = Literal["float32", "bfloat16", "float16"]  # dtypes of activations and unquantized weights
DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "int64"]


class _Names(NamedTuple):
    num_bytes: int
    safetensors: str
    tensorrt: str | None = None
    triton: str | None = None


_DTYPES: dict[str, _Names] = {
    "float32": _Names(4, "F32", "FLOAT", "fp32"),
    "bfloat16": _Names(2, "BF16", "BF16", "bf16"),
    "float16": _Names(2, "F16", "HALF", "fp16"),
    "float8_e4m3fn": _Names(1, "F8_E4M3", "FP8", "fp8e4nv"),
    "int8": _Names(1, "I8", "INT8", "i8"),
    "uint8": _Names(1, "U8", "UINT8", "u8"),
    "int32": _Names(4, "I32", "INT32", "i32"),
    "int64": _Names(8, "I64", "INT64", "i64"),
    # Only foreign files have these; readers of tensors refuse them by name.
    "float64": _Names(8, "F64"),
    "float8_e5m2": _Names(1, "F8_E5M2"),
    "bool": _Names(1, "BOOL"),
    "int16": _Names(2, "I16"),
    "uint16": _Names(2, "U16"),
    "uint32": _Names(4, "U32"),
    "uint64": _Names(8, "U64"),
}
_BY_SAFETENSORS = {names.safetensors: name for name, names in _DTYPES.items()}


def num_bytes_of(dtype: str) -> int:
    """Bytes of one element."""
    return _DTYPES[dtype].num_bytes


def safetensors_dtype(dtype: str) -> str:
    """Spelling in the header of a safetensors file: F32, BF16, F8_E4M3, ..."""
    return _DTYPES[dtype].safetensors


def stored_dtype(safetensors_name: str) -> str | None:
    """Inverse of `safetensors_dtype`; None for a spelling that the table lacks."""
    return _BY_SAFETENSORS.get(safetensors_name)


def stored_num_bytes(safetensors_name: str) -> int:
    """Bytes of one element, by the spelling of a safetensors file."""
    return num_bytes_of(_BY_SAFETENSORS[safetensors_name])


def tensorrt_dtype(dtype: str) -> str:
    """Member of tensorrt.DataType."""
    name = _DTYPES[dtype].tensorrt
    assert name is not None, f"TensorRT has no {dtype}"
    return name


def torch_dtype(dtype: str) -> torch.dtype:
    """`torch.float32` for "float32"."""
    import torch

    assert dtype in _DTYPES, dtype
    return cast("torch.dtype", getattr(torch, dtype))


def dtype_name(dtype: torch.dtype) -> DType:
    """Inverse of `torch_dtype`."""
    name = str(dtype).removeprefix("torch.")
    assert name in _DTYPES, dtype
    return cast(DType, name)


def triton_type(dtype: torch.dtype) -> str:
    """Name of the dtype in a Triton kernel's signature."""
    name = _DTYPES[dtype_name(dtype)].triton
    assert name is not None, f"no kernel takes {dtype}"
    return name
