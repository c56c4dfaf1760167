"""Tensors of a checkpoint's safetensors files, as checked by their headers, without reading data.

Format: https://github.com/huggingface/safetensors#format.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dflash_trt.checkpoint.config_reader import read_json_object
from dflash_trt.core.dtype import num_bytes_of, stored_dtype
from dflash_trt.core.errors import CheckpointError, problem, raise_all
from dflash_trt.core.json_object import parse_json_object, printable

_SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DOWNLOAD_AGAIN = "Download the file again."
_GIT_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_DIMENSIONS = 16
_MAX_COUNT = 2**63 - 1  # for bytes and elements
_MAX_NAME_BYTES = 255  # longer ones are an error of the file system
_MAX_LISTED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor's place in a file; `dtype` in safetensors' spelling (F32, BF16, I64, ...)."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes; 0 for an unknown dtype."""
        dtype = stored_dtype(self.dtype)
        return 0 if dtype is None else math.prod(self.shape) * num_bytes_of(dtype)


@dataclass(frozen=True, kw_only=True)
class StoredTensors:
    """All tensors of one checkpoint directory.

    `unreadable_names` are tensors that the index lists in a missing or broken file. `is_complete` is false if there may
    be tensors of unknown names, so that the absence of a name proves nothing.
    """

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]
    unreadable_names: frozenset[str] = frozenset()
    is_complete: bool = True


def scan_tensors(directory: Path, *, label: str, problems: list[str]) -> StoredTensors:
    """Read the headers of `model.safetensors`, or of the shards in `model.safetensors.index.json`."""
    single, index = directory / _SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        tensors = read_header(single, label=label, problems=problems)
        return StoredTensors(tensors=tensors or {}, files=(single,), is_complete=tensors is not None)
    if index.is_file():
        return _scan_shards(index, label=label, problems=problems)
    found = f"neither in {directory}"
    hint = "Point to a complete Hugging Face checkpoint directory."
    if any(directory.glob("*.bin")):
        found, hint = "PyTorch .bin files", "Convert the checkpoint to safetensors."
    problems.append(problem(f"{label} tensors", expected=f"{_SINGLE_FILE} or {INDEX_FILE}", found=found, hint=hint))
    return StoredTensors(tensors={}, files=(), is_complete=False)


def tensor_file_names(directory: Path) -> tuple[str, ...]:
    """Files that `scan_tensors` wants there, by the index if there is one.

    Raises:
        CheckpointError: the index cannot be read.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return (_SINGLE_FILE,)
    problems: list[str] = []
    weight_map = _read_weight_map(index, label="checkpoint", problems=problems)
    raise_all(CheckpointError, str(directory), problems)
    assert weight_map is not None
    return tuple(sorted(set(weight_map.values())))


def read_header(path: Path, *, label: str, problems: list[str]) -> dict[str, StoredTensor] | None:
    """Read the tensors of one file, by name; append a problem and return None if the file is broken."""
    subject = f"{label} file '{path.name}'"
    try:
        header, data_bytes, found = _load_header(path)
    except OSError as error:
        header, data_bytes, found = None, 0, str(error)
    if header is None:
        problems.append(problem(subject, expected="a whole safetensors file", found=found, hint=_DOWNLOAD_AGAIN))
        return None
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    broken = [name for name, entry in entries.items() if not _is_sound(entry)]
    if broken:
        found = f"a broken header entry for {listed(broken)}"
        problems.append(problem(subject, expected="a valid safetensors header", found=found, hint=_DOWNLOAD_AGAIN))
        return None
    spans = sorted((entry["data_offsets"][0], entry["data_offsets"][1]) for entry in entries.values())
    header_end = spans[-1][1] if spans else 0
    if [begin for begin, _ in spans] != [0, *(end for _, end in spans)][: len(spans)]:
        found = "tensors that overlap or leave gaps"
        problems.append(problem(subject, expected="a valid safetensors header", found=found, hint=_DOWNLOAD_AGAIN))
        return None
    if header_end != data_bytes:
        expected, found = f"{header_end} bytes of tensors, as its header says", f"{data_bytes}"
        problems.append(problem(subject, expected=expected, found=found, hint=_DOWNLOAD_AGAIN))
        return None
    try:
        with safe_open(path, framework="pt"):
            pass  # a last check by the library that will read the tensors
    except SafetensorError as error:
        problems.append(problem(subject, expected="a valid safetensors header", found=f"{error}", hint=_DOWNLOAD_AGAIN))
        return None
    return {
        name: StoredTensor(path=path, name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def listed(names: list[str]) -> str:
    """The first names and a count of the rest, for an error message."""
    shown = ", ".join(f"'{printable(name)}'" for name in names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _load_header(path: Path) -> tuple[dict[str, Any] | None, int, str]:
    """(header, bytes of tensor data, the problem found if there is no header)."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(len(_GIT_LFS_POINTER))
        if prefix == _GIT_LFS_POINTER:
            return None, 0, "a Git LFS pointer (run `git lfs pull`)"
        header_bytes = int.from_bytes(prefix[:8], "little")
        if num_bytes < 8 or header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
            return None, 0, f"{num_bytes} bytes, too few for its header"
        file.seek(8)
        try:
            header = parse_json_object(file.read(header_bytes))
        except ValueError as error:
            return None, 0, f"a header that is not a JSON object: {error}"
    return header, num_bytes - 8 - header_bytes, ""


def _is_sound(entry: Any) -> bool:
    """True if an entry has a dtype, a shape, and offsets that fit its elements."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        return False
    dtype = stored_dtype(entry["dtype"])  # None is left to the dtype check, which refuses it by name
    return dtype is None or math.prod(shape) * num_bytes_of(dtype) == offsets[1] - offsets[0]


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= _MAX_COUNT for x in value)
    )


def _scan_shards(index: Path, *, label: str, problems: list[str]) -> StoredTensors:
    weight_map = _read_weight_map(index, label=label, problems=problems)
    if weight_map is None:
        return StoredTensors(tensors={}, files=(index,), is_complete=False)
    promised: defaultdict[str, set[str]] = defaultdict(set)  # tensors by file
    for name, file_name in weight_map.items():
        promised[file_name].add(name)
    missing = [file_name for file_name in sorted(promised) if not (index.parent / file_name).is_file()]
    for file_name in missing[:_MAX_LISTED]:
        expected = f"a shard with {len(promised[file_name])} tensors"
        problems.append(problem(f"{label} file '{file_name}'", expected=expected, found="none", hint="Download it."))
    if len(missing) > _MAX_LISTED:
        expected, found = f"{len(promised)} shards", f"none for {len(missing)} of them"
        problems.append(problem(f"{label} {INDEX_FILE}", expected=expected, found=found, hint="Download them."))
    tensors: dict[str, StoredTensor] = {}
    unreadable = {name for file_name in missing for name in promised[file_name]}
    files = [index]
    for file_name in sorted(promised.keys() - set(missing)):
        path = index.parent / file_name
        held = read_header(path, label=label, problems=problems)
        if held is None:
            unreadable |= promised[file_name]
            continue
        files.append(path)
        _compare_with_index(file_name, promised[file_name], set(held), label=label, problems=problems)
        tensors |= held
    return StoredTensors(tensors=tensors, files=tuple(files), unreadable_names=frozenset(unreadable))


def _compare_with_index(name: str, promised: set[str], held: set[str], *, label: str, problems: list[str]) -> None:
    if promised == held:
        return
    different = sorted(promised ^ held)
    expected = f"the tensors that {INDEX_FILE} promises in it"
    hint = "Download the index and the shards again, from one revision."
    found = f"a difference in {listed(different)}"
    problems.append(problem(f"{label} file '{name}'", expected=expected, found=found, hint=hint))


def _read_weight_map(index: Path, *, label: str, problems: list[str]) -> dict[str, str] | None:
    subject = f"{label} {index.name}"
    fields = read_json_object(index, label=subject, problems=problems)
    if fields is None:
        return None
    weight_map = fields.get("weight_map")
    if isinstance(weight_map, dict) and all(_is_file_name(name) for name in weight_map.values()):
        return weight_map
    expected = "a weight_map from tensor names to files of the same directory"
    problems.append(problem(subject, expected=expected, found="none", hint=_DOWNLOAD_AGAIN))
    return None


def _is_file_name(name: Any) -> bool:
    """True for a name without a directory: an index must not refer to other directories."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and Path(name).name == name
        and name.endswith(".safetensors")
    )
