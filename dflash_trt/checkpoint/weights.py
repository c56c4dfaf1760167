"""Canonical tensors from stored ones: checks that they fit, and lazy reading of one rank's shard."""

from collections.abc import Callable, Collection, Iterator
from collections.abc import Mapping as AbcMapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dflash_trt.checkpoint.expert_tensors import (
    ExpertLayout,
    part_dtypes,
    part_shapes,
    read_experts,
    read_mxfp4_experts,
)
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable, PairRows, PartRows, Recipe
from dflash_trt.checkpoint.quantized_reading import read_dequantized, read_quantized
from dflash_trt.checkpoint.quantized_weights import QuantizedSource
from dflash_trt.checkpoint.sharding import rank_index, shard
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors, listed
from dflash_trt.checkpoint.vocabulary import read_draft_to_target
from dflash_trt.core.errors import CheckpointError, problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, rank_shard, segment_specs
from dflash_trt.formats.base import tensor_name

_INTEGER_DTYPES = ("I64", "I32")
_MAX_MAPPED_BYTES = 256 * 2**20
_BYTES_AT_ONCE = 64 * 2**20
_OTHER_CHECKPOINT = "Use a checkpoint that belongs to its config.json."


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """A canonical tensor's checked places; see `ForeignNames`."""

    parts: tuple[StoredTensor, ...]
    rows: tuple[PartRows | PairRows, ...]
    recipe: Recipe
    layout: ExpertLayout | None = None


def resolve_sources(
    table: WeightTable,
    names: ForeignTable,
    stored: StoredTensors,
    may_ignore: Callable[[str], bool],
    *,
    label: str,
    problems: list[str],
) -> dict[str, WeightSource]:
    """Locate every canonical tensor; missing, unexpected and mis-shaped ones go to `problems`.

    Tensors whose names `may_ignore` takes are never unexpected.
    """
    assert set(table) == set(names), f"tables differ in {set(table) ^ set(names)}"
    if not stored.is_complete:
        return {}  # `problems` has the broken files, and the absence of a name proves nothing
    used = {part for foreign in names.values() for part in foreign.parts}
    missing = sorted(used - set(stored.tensors) - stored.unreadable_names)
    if missing:
        problems.append(_missing(missing, label))
    unexpected = sorted(name for name in set(stored.tensors) - used if not may_ignore(name))
    if unexpected:
        problems.append(_unexpected(unexpected, label))
    sources = {}
    for canonical, foreign in names.items():
        _check_parts(table[canonical], foreign, stored, label=label, problems=problems)
        if all(part in stored.tensors for part in foreign.parts):
            parts = tuple(stored.tensors[part] for part in foreign.parts)
            sources[canonical] = WeightSource(
                parts=parts, rows=foreign.rows, recipe=foreign.recipe, layout=foreign.layout
            )
    return sources


def read_weights(
    table: WeightTable,
    sources: dict[str, WeightSource],
    *,
    dtype: torch.dtype,
    mapping: Mapping,
    quantized: AbcMapping[str, QuantizedSource] | None = None,
    whole_names: Collection[str] = (),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one rank's canonical tensors in table order, one in memory at a time; integers stay int64.

    A layer in `quantized`, or in MXFP4, comes as its tensors; see `quantized_reading.read_quantized`. `whole_names` are
    not sharded.

    Raises:
        CheckpointError: a value is not finite, as stored or in `dtype`.
    """
    with ExitStack() as stack:
        opened = OpenFiles(stack)
        for name, spec in table.items():
            cut = Mapping() if name in whole_names else mapping
            if quantized is not None and name in quantized and spec.is_plain:
                yield name, read_dequantized(spec, quantized[name], opened.slice_of, dtype=dtype, mapping=cut)
                continue
            if quantized is not None and name in quantized:
                yield from read_quantized(name, spec, quantized[name], opened.slice_of, dtype=dtype, mapping=cut)
                continue
            source = sources[name]
            if source.layout is not None and source.layout.is_mxfp4:
                fields = read_mxfp4_experts(source.layout, source.parts, spec, opened.slice_of, mapping=cut)
                yield from ((tensor_name(name, field), tensor) for field, tensor in fields)
                continue
            if spec.is_integer:
                yield name, shard(_read_integers(spec, source), spec, cut)
                continue
            own_dtype = torch.float32 if spec.is_float32 else dtype
            tensor = _read_floats(spec, source, opened, dtype=own_dtype, mapping=cut)
            if source.recipe == "plus_one":
                tensor += 1
            _require_finite(name, tensor, source)
            yield name, tensor


class OpenFiles:
    """Opens each safetensors file on first use, and reopens it after a while.

    A file is memory-mapped, and pages that were read count as memory of this process until the file is reopened. Slices
    must not outlive the next call.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._files: dict[Path, Any] = {}
        self._open_ones = ExitStack()
        self._num_bytes_read = 0
        stack.callback(self._close)

    def slice_of(self, stored: StoredTensor, num_bytes: int | None = None) -> Any:
        """The tensor, of which `num_bytes` (default: all) will be read."""
        if self._num_bytes_read > _MAX_MAPPED_BYTES:
            self._close()
        if stored.path not in self._files:
            file = safe_open(stored.path, framework="pt", device="cpu")
            self._files[stored.path] = self._open_ones.enter_context(file)
        self._num_bytes_read += stored.num_bytes if num_bytes is None else num_bytes
        return self._files[stored.path].get_slice(stored.name)

    def _close(self) -> None:
        self._files.clear()
        self._open_ones.close()
        self._num_bytes_read = 0


def _read_floats(
    spec: WeightSpec, source: WeightSource, opened: OpenFiles, *, dtype: torch.dtype, mapping: Mapping
) -> torch.Tensor:  # rank_shard(spec, mapping).shape
    if source.layout is not None:
        return read_experts(source.layout, source.parts, spec, opened.slice_of, dtype=dtype, mapping=mapping)
    if source.recipe == "ones":
        return torch.ones(rank_shard(spec, mapping).shape, dtype=dtype)
    tensor = torch.empty(rank_shard(spec, mapping).shape, dtype=dtype)
    row = 0
    for i, (part, part_spec) in enumerate(zip(source.parts, segment_specs(spec), strict=True)):
        rows, *columns = rank_index(part_spec, mapping)
        start, stop, _ = rows.indices(part_spec.shape[0])
        row_bytes = max(1, part.num_bytes // part.shape[0])
        for first in range(start, stop, max(1, _BYTES_AT_ONCE // row_bytes)):
            last = min(stop, first + max(1, _BYTES_AT_ONCE // row_bytes))
            for span in source.rows[i].spans(first, last) if source.rows else (slice(first, last),):
                num_rows = span.stop - span.start
                piece = opened.slice_of(part, num_rows * row_bytes)[(span, *columns)]
                tensor[row : row + num_rows].copy_(piece.view(tensor[row : row + num_rows].shape))  # casts to `dtype`
                row += num_rows
    return tensor


def _read_integers(spec: WeightSpec, source: WeightSource) -> torch.Tensor:  # int64, spec.shape
    if source.recipe == "identity":
        return torch.arange(spec.shape[0], dtype=torch.int64)
    assert source.recipe == "offsets", f"integers are never {source.recipe}"
    return read_draft_to_target(source.parts[0])


def _require_finite(name: str, tensor: torch.Tensor, source: WeightSource) -> None:
    if all(bool(part.isfinite().all()) for part in torch.split(tensor.flatten(), _BYTES_AT_ONCE)):
        return
    where = listed([part.name for part in source.parts])
    hint = "Download the checkpoint again; if it is whole, build with a dtype of wider range (bfloat16 or float32)."
    expected, found = f"finite values in {tensor.dtype}", f"NaN or infinity (stored as {where})"
    raise CheckpointError.about(f"tensor '{name}'", expected=expected, found=found, hint=hint)


def _missing(names: Collection[str], label: str) -> str:
    found = f"{len(names)} missing: {listed(list(names))}"
    return problem(f"{label} tensors", expected="every tensor of its config.json", found=found, hint=_OTHER_CHECKPOINT)


def _unexpected(names: Collection[str], label: str) -> str:
    found = f"{len(names)} unexpected: {listed(list(names))}"
    hint = "Use a checkpoint without them: what they do is not implemented."
    return problem(f"{label} tensors", expected="no tensor beyond its config.json", found=found, hint=hint)


def _check_parts(
    spec: WeightSpec, foreign: ForeignNames, stored: StoredTensors, *, label: str, problems: list[str]
) -> None:
    """Check shape and dtype of every stored part."""
    allowed = _INTEGER_DTYPES if spec.is_integer else part_dtypes(foreign.layout or ExpertLayout())
    for name, shape in zip(foreign.parts, _part_shapes(spec, foreign), strict=True):
        tensor = stored.tensors.get(name)
        if tensor is None:
            continue
        subject = f"{label} tensor '{name}'"
        if tensor.shape != shape:
            expected, found = f"shape {list(shape)}", str(list(tensor.shape))
            problems.append(problem(subject, expected=expected, found=found, hint=_OTHER_CHECKPOINT))
        if tensor.dtype not in allowed:
            hint = "Use the unquantized checkpoint."
            expected = f"dtype {' or '.join(allowed)}"
            problems.append(problem(subject, expected=expected, found=tensor.dtype, hint=hint))


def _part_shapes(spec: WeightSpec, foreign: ForeignNames) -> list[tuple[int, ...]]:
    """Shapes of the parts: the whole tensor, its segments, or parts of the experts' layout."""
    num_parts = len(foreign.parts)
    if foreign.layout is not None:
        return part_shapes(foreign.layout, spec.shape, num_parts)
    if foreign.rows:
        return [rows.stored_shape for rows in foreign.rows]
    if num_parts <= 1:
        return [spec.shape] * num_parts
    assert num_parts == len(spec.segments), f"{num_parts} parts for {len(spec.segments)} segments"
    return [(rows, *spec.shape[1:]) for rows in spec.segments]
