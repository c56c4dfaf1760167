"""Quantized linear layers of a ModelOpt export: checks of their tensors, and the reading of one rank's shard.

Foreign per module M: `M.weight` (codes), `M.weight_scale` (FP8: a number; NVFP4: block scales), `M.weight_scale_2`
(NVFP4: a number), `M.input_scale`; K/V scales are `k_proj.k_scale` and `v_proj.v_scale`. Canonical names and layouts:
`formats/base.py`, where the parts of a fused linear layer are segments, each with its own scales.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.foreign_names import ForeignTable
from dflash_trt.checkpoint.modelopt_config import QUANT_CONFIG_FILE, ModelOptConfig
from dflash_trt.checkpoint.sharding import rank_index
from dflash_trt.checkpoint.tensors import StoredTensor, StoredTensors, listed
from dflash_trt.core.dtype import safetensors_dtype
from dflash_trt.core.errors import CheckpointError, problem
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, is_linear, segment_specs
from dflash_trt.formats.base import WeightFormat, tensor_name
from dflash_trt.formats.registry import weight_format

_PACKED_DTYPES = ("F8_E4M3", "U8")
_EXPORT_AGAIN = "Export the checkpoint again."

OpenSlice = Callable[[StoredTensor], Any]  # the stored tensor, to be indexed as safetensors' slices are


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedPart:
    """One of the linear layers fused in a canonical one. It is unquantized, without `scales`, if `format` is None."""

    weight: StoredTensor
    format: str | None
    scales: dict[str, StoredTensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedSource:
    """Parts of a canonical linear layer; `format` is None if they differ."""

    parts: tuple[QuantizedPart, ...]

    @property
    def format(self) -> str | None:
        formats = {part.format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None


def resolve_quantized(
    table: WeightTable,
    names: ForeignTable,
    stored: StoredTensors,
    config: ModelOptConfig | None,
    *,
    label: str,
    problems: list[str],
) -> tuple[dict[str, QuantizedSource], StoredTensors]:
    """Return a checkpoint's quantized linear layers, and the remaining tensors."""
    if config is None:
        return {}, stored
    sources: dict[str, QuantizedSource] = {}
    used: set[str] = set()
    for canonical, spec in table.items():
        parts = [stored.tensors.get(name) for name in names[canonical].parts]
        if not any(part is not None and part.dtype in _PACKED_DTYPES for part in parts) or not is_linear(
            spec, canonical
        ):
            continue
        if None in parts:
            continue  # `resolve_sources` reports missing tensors
        quantized = tuple(
            _resolve_part(part, part_spec.shape[0], part_spec.shape[1], stored, config, label=label, problems=problems)
            for part, part_spec in zip(parts, segment_specs(spec), strict=True)
            if part is not None
        )
        sources[canonical] = QuantizedSource(parts=quantized)
        used |= {tensor.name for part in quantized for tensor in (part.weight, *part.scales.values())}
    rest = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
    return sources, replace(stored, tensors=rest)


def read_quantized(
    name: str, spec: WeightSpec, source: QuantizedSource, open_slice: OpenSlice, *, dtype: torch.dtype, mapping: Mapping
) -> Iterator[tuple[str, Tensor]]:
    """Yield the engine tensors of a quantized linear layer, in the order of its format's layout.

    Parts of different formats come one by one, as layers `NAME/0`, `NAME/1`, ...

    Raises:
        CheckpointError: a scale or a code is not finite, or a scale is not positive.
    """
    if source.format is not None:
        yield from _read_parts(name, spec, source.parts, open_slice, weight_format(source.format), mapping)
        return
    for i, (part, part_spec) in enumerate(zip(source.parts, segment_specs(spec), strict=True)):
        if part.format is not None:
            yield from _read_parts(f"{name}/{i}", part_spec, (part,), open_slice, weight_format(part.format), mapping)
        else:
            yield f"{name}/{i}", _cut(part.weight, part_spec, part, open_slice, mapping).to(dtype)


def _read_parts(
    name: str,
    spec: WeightSpec,
    parts: tuple[QuantizedPart, ...],
    open_slice: OpenSlice,
    known: WeightFormat,
    mapping: Mapping,
) -> Iterator[tuple[str, Tensor]]:
    for field, kind in known.modelopt_tensors.items():
        stored = [part.weight if field == "codes" else part.scales[kind] for part in parts]
        if field in known.weight_type.per_segment:
            yield tensor_name(name, field), _numbers(stored, open_slice)
            continue
        sources = zip(stored, segment_specs(spec), parts, strict=True)
        pieces = [_cut(tensor, part_spec, part, open_slice, mapping) for tensor, part_spec, part in sources]
        joined = torch.cat([piece.view(torch.uint8) for piece in pieces])  # no torch.cat for float8 on a CPU
        yield tensor_name(name, field), joined.view(pieces[0].dtype)


def read_number(stored: StoredTensor, open_slice: OpenSlice) -> float:
    """Read a scalar scale.

    Raises:
        CheckpointError: it is not finite and positive.
    """
    value = float(_whole(stored, open_slice).float().reshape(()))
    if not (0.0 < value < float("inf")):
        subject = f"tensor '{stored.name}'"
        raise CheckpointError.about(
            subject, expected="a finite, positive scale", found=f"{value:g}", hint=_EXPORT_AGAIN
        )
    return value


def _resolve_part(
    weight: StoredTensor,
    rows: int,
    columns: int,
    stored: StoredTensors,
    config: ModelOptConfig,
    *,
    label: str,
    problems: list[str],
) -> QuantizedPart:
    module = weight.name.removesuffix(".weight")
    claimed = config.format_of(module)
    if weight.dtype not in _PACKED_DTYPES:
        return QuantizedPart(weight=weight, format=None, scales={})
    subject = f"{label} tensor '{weight.name}'"
    if claimed is None:
        expected = f"an unquantized dtype, as in {QUANT_CONFIG_FILE}"
        problems.append(problem(subject, expected=expected, found=weight.dtype, hint=_EXPORT_AGAIN))
        return QuantizedPart(weight=weight, format=None, scales={})
    known = weight_format(claimed)
    shapes = _shapes(known, rows, columns)
    _check(weight, shapes["weight"], known, label=label, problems=problems)
    scales = {}
    missing = []
    for kind in [kind for kind in known.modelopt_tensors.values() if kind != "weight"]:
        scale = stored.tensors.get(f"{module}.{kind}")
        if scale is None:
            missing.append(f"{module}.{kind}")
            continue
        _check(scale, shapes[kind], known, label=label, problems=problems)
        scales[kind] = scale
    if missing:
        found = f"no {listed(missing)}"
        expected = f"the scales of {claimed}"
        problems.append(problem(subject, expected=expected, found=found, hint=_EXPORT_AGAIN))
    return QuantizedPart(weight=weight, format=claimed, scales=scales)


def _shapes(known: WeightFormat, rows: int, columns: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each kind of tensor; per-segment scales are scalars here."""
    layout = known.layout((rows, columns), (rows,))
    return {
        kind: (
            safetensors_dtype(layout[field].dtype),
            () if field in known.weight_type.per_segment else layout[field].shape,
        )
        for field, kind in known.modelopt_tensors.items()
    }


def _check(
    tensor: StoredTensor, expected: tuple[str, tuple[int, ...]], known: WeightFormat, *, label: str, problems: list[str]
) -> None:
    dtype, shape = expected
    is_number = shape == () and tensor.shape in ((), (1,))
    if tensor.dtype == dtype and (tensor.shape == shape or is_number):
        return
    hint = ""
    block = known.columns_per_block
    if dtype == "F8_E4M3" and len(tensor.shape) == len(shape) == 2 and block > 1 and tensor.shape[1]:
        hint = f" (blocks of {shape[1] * block // tensor.shape[1]} columns instead of {block})"
    wanted, found = f"{dtype} {list(shape)} for {known.name}", f"{tensor.dtype} {list(tensor.shape)}{hint}"
    problems.append(problem(f"{label} tensor '{tensor.name}'", expected=wanted, found=found, hint=_EXPORT_AGAIN))


def _cut(
    stored: StoredTensor, part_spec: WeightSpec, part: QuantizedPart, open_slice: OpenSlice, mapping: Mapping
) -> Tensor:
    """Read this rank's shard of codes or block scales, and refuse NaN."""
    tensor: Tensor = open_slice(stored)[rank_index(replace(part_spec, shape=stored.shape), mapping)]
    if stored.dtype == "F8_E4M3":
        raw = tensor.view(torch.uint8)
        is_nan = (raw & 0x7F) == 0x7F
        is_wrong = is_nan | (raw > 0x7F) if stored is not part.weight else is_nan  # a block scale is never negative
        if bool(is_wrong.any()):
            found = f"{int(is_wrong.sum())} codes that are NaN or of the wrong sign"
            expected = "finite E4M3 values"
            raise CheckpointError.about(f"tensor '{stored.name}'", expected=expected, found=found, hint=_EXPORT_AGAIN)
    return tensor


def _numbers(scales: list[StoredTensor], open_slice: OpenSlice) -> Tensor:  # float32 [segments]
    return torch.tensor([read_number(scale, open_slice) for scale in scales], dtype=torch.float32)


def _whole(stored: StoredTensor, open_slice: OpenSlice) -> Tensor:
    tensor: Tensor = open_slice(stored)[...]
    return tensor
