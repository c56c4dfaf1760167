"""The table of dtypes agrees with the libraries that have the names."""

import pytest
import safetensors.torch
import torch

from dflash_trt.core.dtype import (
    dtype_name,
    num_bytes_of,
    safetensors_dtype,
    stored_dtype,
    stored_num_bytes,
    tensorrt_dtype,
    torch_dtype,
    triton_type,
)

NAMES = (
    *("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "int64"),
    *("float64", "float8_e5m2", "bool", "int16", "uint16", "uint32", "uint64"),
)

TRITON = ["fp32", "bf16", "fp16", "fp8e4nv", "i8", "u8", "i32", "i64"]
TENSORRT = ["FLOAT", "BF16", "HALF", "FP8", "INT8", "UINT8", "INT32", "INT64"]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_spellings_are_those_of_pytorch_and_safetensors(name: str) -> None:
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name and num_bytes_of(name) == dtype.itemsize
    stored = safetensors.torch.save({"x": torch.zeros(1, dtype=dtype)})
    spelling = safetensors.deserialize(stored)[0][1]["dtype"]
    assert safetensors_dtype(name) == spelling and stored_dtype(spelling) == name
    assert stored_num_bytes(spelling) == dtype.itemsize
    assert stored_dtype(spelling.lower()) is None


def test_kernels_and_tensorrt_know_what_engines_have() -> None:
    assert [triton_type(torch_dtype(name)) for name in NAMES[:8]] == TRITON
    assert [tensorrt_dtype(name) for name in NAMES[:8]] == TENSORRT
    for function, value in ((tensorrt_dtype, "float64"), (triton_type, torch.bool), (torch_dtype, "half")):
        with pytest.raises(AssertionError):
            function(value)
