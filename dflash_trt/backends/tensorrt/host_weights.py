"""Weights as host tensors for a TensorRT network: from files, torch tensors or nothing, never copied."""

import mmap
from collections.abc import Iterator
from collections.abc import Mapping as AbcMapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, cast

import numpy as np

from dflash_trt.backends.tensorrt.host_tensor import HostTensor, host_array
from dflash_trt.backends.tensorrt.host_views import host_tensor
from dflash_trt.backends.tensorrt.network import StepNetworkSpec
from dflash_trt.backends.tensorrt.ops import RopeTables
from dflash_trt.backends.torch.ops import make_rope_table
from dflash_trt.core.dtype import DType, safetensors_dtype, stored_dtype, torch_dtype
from dflash_trt.core.model.rope import Rotary
from dflash_trt.engine_dir import TensorHeader
from dflash_trt.engine_dir.tensor_file import tensor_offsets

_GIVE_BACK_S: Final = 0.1  # between two times that mapped pages are given back


def host_rope_tables(spec: StepNetworkSpec, *, max_seq_len: int) -> RopeTables:
    """cos and sin of each decoder up to the last position a draft block may reach, in the network's dtype."""
    num_positions = num_rope_positions(max_seq_len, spec.max_draft_len)
    tables = {}
    for i, rotary in enumerate(_rotaries(spec)):
        cos, sin = make_rope_table(rotary, num_positions=num_positions, dtype=torch_dtype(spec.dtype))
        tables[rotary] = (host_tensor(f"rope_cos.{i}", cos), host_tensor(f"rope_sin.{i}", sin))
    return tables


def blank_rope_tables(spec: StepNetworkSpec, *, max_seq_len: int) -> RopeTables:
    """Tables of the same shapes, of zeros: see `blank_tensors`."""
    num_positions, dtype = num_rope_positions(max_seq_len, spec.max_draft_len), safetensors_dtype(spec.dtype)
    tables = {}
    for i, rotary in enumerate(_rotaries(spec)):
        header = TensorHeader(dtype=dtype, shape=(num_positions, 1, rotary.head_dim))
        blank = blank_tensors({f"rope_cos.{i}": header, f"rope_sin.{i}": header})
        tables[rotary] = (blank[f"rope_cos.{i}"], blank[f"rope_sin.{i}"])
    return tables


def num_rope_positions(max_seq_len: int, max_draft_len: int) -> int:
    """Positions up to the last one that a draft block may reach."""
    return max_seq_len + 2 * max_draft_len + 1


def blank_tensors(headers: AbcMapping[str, TensorHeader]) -> dict[str, HostTensor]:
    """Zeros that use address space only: read-only pages. Scales are 1, so that nothing divides by 0."""
    starts, end = {}, 0
    for name, header in headers.items():
        starts[name] = end
        end += -(-header.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    zeros = np.frombuffer(
        mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ), np.uint8
    )
    return {
        name: host_array(name, np.ones(header.shape, np.float32))
        if header.dtype == "F32" and name.endswith("_scale")
        else _stored_tensor(name, header, zeros, starts[name])
        for name, header in headers.items()
    }


@contextmanager
def mapped_tensors(path: Path, headers: AbcMapping[str, TensorHeader]) -> Iterator[dict[str, HostTensor]]:
    """The tensors of a file of `write_tensor_file`, mapped.

    TensorRT copies them once; pages that it has read are repeatedly returned to the system, so a build holds the
    weights once.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    memory, is_done = np.frombuffer(mapping, np.uint8), Event()

    def give_back() -> None:
        while not is_done.wait(_GIVE_BACK_S):
            mapping.madvise(mmap.MADV_DONTNEED)  # clean pages of a file: they are read again on demand

    thread = Thread(target=give_back, daemon=True, name="mapped weights")
    thread.start()
    try:
        offsets = tensor_offsets(path)
        yield {name: _stored_tensor(name, header, memory, offsets[name]) for name, header in headers.items()}
    finally:
        is_done.set()
        thread.join()


def _stored_tensor(name: str, header: TensorHeader, memory: "np.ndarray[Any, Any]", start: int) -> HostTensor:
    dtype = cast(DType, stored_dtype(header.dtype))
    return HostTensor(name=name, dtype=dtype, shape=header.shape, address=memory.ctypes.data + start, owner=memory)


def _rotaries(spec: StepNetworkSpec) -> tuple[Rotary, ...]:
    decoders = [spec.target] if spec.draft is None else [spec.draft, spec.target]
    return tuple(dict.fromkeys(rotary for decoder in decoders for rotary in decoder.rotaries))
