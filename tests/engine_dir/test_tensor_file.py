import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open

from dflash_trt.backends.tensorrt.host_weights import mapped_tensors
from dflash_trt.backends.torch.loading import mapped_weights
from dflash_trt.engine_dir import EngineDir, TensorHeader
from dflash_trt.engine_dir.tensor_file import (
    read_tensor_headers,
    tensor_file_num_bytes,
    tensor_offsets,
    write_tensor_file,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}


@st.composite
def _tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(_is_name), unique=True, max_size=5))
    return {name: draw(_tensor()) for name in names}


@st.composite
def _tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    return torch.randint(-100, 100, tuple(shape)).to(dtype)


def _is_name(name: str) -> bool:
    return name != "__metadata__" and name.isprintable()


@settings(max_examples=60, deadline=None)
@given(tensors=_tensors())
def test_safetensors_reads_back_what_the_streaming_writer_wrote(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    headers = {name: _header(tensor) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        write_tensor_file(file, headers, ((name, _bytes(tensor)) for name, tensor in tensors.items()))
    assert path.stat().st_size == tensor_file_num_bytes(headers)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert read_tensor_headers(path) == headers
    content = path.read_bytes()
    for name, begin in tensor_offsets(path).items():
        assert content[begin : begin + headers[name].num_bytes] == _bytes(tensors[name]).tobytes()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("order", ["a", "ba", "abc", "aa"])
def test_tensors_that_are_missing_extra_or_out_of_order_are_a_bug(tmp_path: Path, order: str) -> None:
    headers = {name: TensorHeader(dtype="F32", shape=(2,)) for name in "ab"}
    with (tmp_path / "x").open("wb") as file, pytest.raises(AssertionError):
        write_tensor_file(file, headers, ((name, memoryview(bytes(8))) for name in order))


def test_the_writer_asks_for_a_tensor_only_after_the_last_one_is_written(tmp_path: Path) -> None:
    sizes: list[int] = []
    path = tmp_path / "x"

    def tensors() -> Iterator[tuple[str, memoryview]]:
        for name in "abc":
            sizes.append(path.stat().st_size)
            yield name, memoryview(bytes(4096))

    headers = {name: TensorHeader(dtype="F32", shape=(1024,)) for name in "abc"}
    with path.open("wb", buffering=0) as file:
        write_tensor_file(file, headers, tensors())
    assert np.diff(sizes).tolist() == [4096, 4096]


def _header(tensor: torch.Tensor) -> TensorHeader:
    dtype = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    return TensorHeader(dtype=dtype, shape=tuple(tensor.shape))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def test_weights_are_found_by_name_in_a_file_of_another_order(engine: Path) -> None:
    """As another version may have written it."""
    path = engine / "rank0.safetensors"
    opened = EngineDir.open(engine)
    with mapped_weights(opened, 0) as tensors:
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
    headers = dict(reversed(read_tensor_headers(path).items()))
    contents = {name: _bytes(expected[name]) for name in headers}
    with path.open("wb") as file:
        write_tensor_file(file, headers, contents.items())
    with mapped_weights(opened, 0) as tensors:
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    with mapped_tensors(path, headers) as mapped:
        for name, tensor in mapped.items():
            assert ctypes.string_at(tensor.address, headers[name].num_bytes) == contents[name].tobytes(), name
