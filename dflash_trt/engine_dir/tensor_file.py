"""A writer of safetensors files that holds one tensor at a time, and a reader of their headers.

A file is an 8-byte little-endian length, a JSON header and the bytes of the tensors without gaps. safetensors' own
writer needs all tensors in memory at once.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open

from dflash_trt.core.dtype import stored_num_bytes

_HEADER_ALIGNMENT = 8  # so that mapped tensors are aligned
_METADATA = "__metadata__"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """`dtype` in safetensors' spelling: F32, BF16, F16, F8_E4M3, U8, I64."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return stored_num_bytes(self.dtype) * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class ByteSink(Protocol):
    def write(self, chunk: bytes | memoryview, /) -> object: ...


def write_tensor_file(
    file: ByteSink, headers: Mapping[str, TensorHeader], tensors: Iterable[tuple[str, memoryview]]
) -> None:
    """Write `tensors`, all of them in the order of `headers`; little-endian, C order."""
    file.write(tensor_file_header(headers))
    expected = iter(headers.items())
    for name, content in tensors:
        expected_name, header = next(expected, (None, None))
        assert name == expected_name, f"tensor {name} came where {expected_name} was due"
        assert header is not None and content.nbytes == header.num_bytes, (
            f"{name}: {content.nbytes} bytes, not {header}"
        )
        file.write(content)
    left = [name for name, _ in expected]
    assert not left, f"tensors never came: {left}"


def tensor_file_num_bytes(headers: Mapping[str, TensorHeader]) -> int:
    """The size of the file that `write_tensor_file` writes."""
    return len(tensor_file_header(headers)) + sum(header.num_bytes for header in headers.values())


def tensor_offsets(path: Path) -> dict[str, int]:
    """Where in a file each tensor's bytes begin, as its header says: another version may have written another order."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        fields = json.loads(file.read(num_bytes))
    return {name: 8 + num_bytes + entry["data_offsets"][0] for name, entry in fields.items() if name != _METADATA}


def read_tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Headers of a file's tensors, by name.

    Raises:
        ValueError: truncated, or not a safetensors file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {
                name: TensorHeader(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def tensor_file_header(headers: Mapping[str, TensorHeader]) -> bytes:
    fields: dict[str, object] = {_METADATA: {"format": "pt"}}
    begin = 0
    for name, header in headers.items():
        end = begin + header.num_bytes
        fields[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
