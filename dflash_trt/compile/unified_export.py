"""A target or a drafter as a Hugging Face checkpoint in ModelOpt's unified format.

The files mirror the source, tensor by tensor: linear layers that the plan quantizes become codes and scales, in the
bytes that ModelOpt 0.47's exporter writes for the same ranges; everything else is copied unchanged.
hf_quant_config.json describes them, also in config.json.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.expert_tensors import ExpertLayout
from dflash_trt.checkpoint.foreign_names import ForeignNames, ForeignTable
from dflash_trt.checkpoint.producers.base import StoredField
from dflash_trt.checkpoint.producers.modelopt import stored_as
from dflash_trt.checkpoint.tensors import INDEX_FILE, StoredTensor, StoredTensors
from dflash_trt.checkpoint.weights import OpenFiles
from dflash_trt.core.dtype import safetensors_dtype, stored_dtype
from dflash_trt.core.errors import problem
from dflash_trt.core.quantization import Calibration, LayerKvScales
from dflash_trt.core.weight_spec import segments_of
from dflash_trt.engine_dir import TensorHeader
from dflash_trt.formats.base import QuantizedWeight, TensorLayout, WeightFormat, segment_amax
from dflash_trt.formats.registry import weight_format
from dflash_trt.quantize.plan import PlannedLinear

_KEEP = "Keep it unquantized with an override, or quantize with --backend torch or tensorrt."


@dataclass(frozen=True, kw_only=True)
class QuantizedPart:
    """A stored weight that becomes codes and scales. `group` has all parts that share a scale.

    With `is_transposed` it has all experts, [experts, in, out], and all of them share a scale.
    """

    linear: PlannedLinear
    part: StoredTensor
    group: tuple[StoredTensor, ...]
    is_transposed: bool = False

    @property
    def module(self) -> str:
        """That of a description: both tensors of all experts are of one."""
        return self.part.name.rpartition(".")[0]

    @property
    def format(self) -> WeightFormat:
        return weight_format(self.linear.format or "")

    def layout(self) -> dict[str, TensorLayout]:
        """By the name of each stored tensor; what is one number for a segment is a scalar."""
        shape = self._exchanged(self.part.shape)
        layout = self.format.layout(shape, (shape[-2],))
        shapes = {name: self._exchanged(tensor.shape) for name, tensor in layout.items()}
        shapes |= dict.fromkeys(self.format.weight_type.per_segment, ())
        _, stored = stored_as(self.format.name)
        return {self.name_of(place): replace(layout[name], shape=shapes[name]) for name, place in stored.fields.items()}

    def name_of(self, place: StoredField) -> str:
        """Name of a stored tensor."""
        if self.part.name.endswith(".weight"):
            return f"{self.module}.{place.suffix}"
        return self.part.name if place.suffix == "weight" else f"{self.part.name}_{place.suffix}"

    def _exchanged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *reversed(shape[1:])) if self.is_transposed else shape


@dataclass(frozen=True, kw_only=True)
class Change:
    """Replacement of a stored tensor: other tensors, by name."""

    layout: dict[str, TensorLayout]
    make: Callable[[OpenFiles], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint to be written: its source, and the changes by the name of the stored tensor."""

    stored: StoredTensors
    changes: Mapping[str, Change] = field(default_factory=dict)

    def headers(self) -> dict[str, dict[str, TensorHeader]]:
        """Headers by tensor file, in the order of the source."""
        files: dict[str, dict[str, TensorHeader]] = {}
        for name, tensor in self.stored.tensors.items():
            change = self.changes.get(name)
            found = {name: TensorHeader(dtype=tensor.dtype, shape=tensor.shape)}
            if change is not None:
                found = {
                    key: TensorHeader(dtype=safetensors_dtype(layout.dtype), shape=layout.shape)
                    for key, layout in change.layout.items()
                }
            files.setdefault(tensor.path.name, {}).update(found)
        return files

    def index(self) -> dict[str, Any] | None:
        """The fields of model.safetensors.index.json; None for a checkpoint of one file without one."""
        if not any(path.name == INDEX_FILE for path in self.stored.files):
            return None
        headers = self.headers()
        total = sum(header.num_bytes for tensors in headers.values() for header in tensors.values())
        weight_map = {name: file for file, tensors in headers.items() for name in tensors}
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    def contents(self, file_name: str) -> Iterator[tuple[str, memoryview]]:
        """Names and bytes of one file's tensors, one in memory at a time."""
        with ExitStack() as stack:
            opened = OpenFiles(stack)
            for name, tensor in self.stored.tensors.items():
                if tensor.path.name != file_name:
                    continue
                change = self.changes.get(name)
                made = {name: opened.slice_of(tensor)[...]} if change is None else change.make(opened)
                for key in (name,) if change is None else change.layout:
                    yield key, made[key].contiguous().reshape(-1).view(torch.uint8).numpy().data


def quantized_parts(
    linears: Sequence[PlannedLinear], names: ForeignTable, stored: StoredTensors, problems: list[str]
) -> list[QuantizedPart]:
    """Stored weights of the linear layers that the plan quantizes; adds other layouts to `problems`."""
    parts: list[QuantizedPart] = []
    for linear in linears:
        if not linear.is_to_be_quantized:
            continue
        foreign = names.get(linear.name)
        num_segments = len(segments_of(linear.spec))
        is_transposed = foreign is not None and foreign.layout == ExpertLayout(is_transposed=True)
        if foreign is None or not (is_transposed or _is_a_matrix_each(foreign, linear, num_segments)):
            found = "a copy that only an engine has" if foreign is None else f"'{foreign.parts[0]}'"
            expected = "a matrix for each projection and expert, or experts [experts, in, out]"
            problems.append(problem(f"{linear.name} in {linear.format}", expected=expected, found=found, hint=_KEEP))
            continue
        tensors = [stored.tensors[name] for name in foreign.parts]
        if is_transposed:
            parts.append(QuantizedPart(linear=linear, part=tensors[0], group=tuple(tensors), is_transposed=True))
            continue
        for first in range(0, len(tensors), num_segments):
            group = tuple(tensors[first : first + num_segments])
            parts += [QuantizedPart(linear=linear, part=part, group=group) for part in group]
    return parts


def quantized_changes(
    parts: Sequence[QuantizedPart], calibration: Calibration, *, dtype: torch.dtype
) -> dict[str, Change]:
    """`dtype` is the weights' dtype before they are quantized."""
    return {
        part.part.name: Change(layout=part.layout(), make=_quantizer(part, calibration, dtype=dtype)) for part in parts
    }


def kv_changes(
    changes: Mapping[str, Change], stored: StoredTensors, scales: Sequence[LayerKvScales]
) -> dict[str, Change]:
    """`changes`, with the scales of each layer's K and V after k_proj and v_proj."""
    changed = dict(changes)
    for i, layer in enumerate(scales):
        for x, value in (("k", layer.k), ("v", layer.v)):
            module = f"model.layers.{i}.self_attn.{x}_proj"
            before = changed.get(f"{module}.weight") or _as_stored(stored.tensors[f"{module}.weight"])
            changed[f"{module}.weight"] = _with_scalar(before, f"{module}.{x}_scale", value)
    return changed


def dropped() -> Change:
    """No tensor in place of a stored one."""
    return Change(layout={}, make=lambda opened: {})


def renamed(tensor: StoredTensor, name: str) -> Change:
    """The same tensor, by another name."""
    (layout,) = _as_stored(tensor).layout.values()
    return Change(layout={name: layout}, make=lambda opened: {name: opened.slice_of(tensor)[...]})


def permuted_blocks(tensor: StoredTensor, order: Sequence[int]) -> Change:
    """The blocks of the last axis in another order: block j is block order[j] of the stored one."""

    def make(opened: OpenFiles) -> Mapping[str, Tensor]:
        blocks = opened.slice_of(tensor)[...].chunk(len(order), dim=-1)
        return {tensor.name: torch.cat([blocks[j] for j in order], dim=-1)}

    return replace(_as_stored(tensor), make=make)


def _is_a_matrix_each(foreign: ForeignNames, linear: PlannedLinear, num_segments: int) -> bool:
    if not all(name.endswith(".weight") for name in foreign.parts) or not all(rows.is_whole for rows in foreign.rows):
        return False
    if linear.spec.num_experts:
        return foreign.layout is not None and foreign.layout.is_one_by_one
    return foreign.recipe == "stacked" and len(foreign.parts) == num_segments


def _quantizer(
    part: QuantizedPart, calibration: Calibration, *, dtype: torch.dtype
) -> Callable[[OpenFiles], Mapping[str, Tensor]]:
    def make(opened: OpenFiles) -> Mapping[str, Tensor]:
        if part.is_transposed:
            return _quantized_experts(part, calibration, opened, dtype=dtype)
        weight = _read(opened, part.part, dtype)
        amax = segment_amax(weight, (len(weight),))
        if part.linear.shares_weight_scale:
            others = [_read(opened, other, dtype) for other in part.group if other is not part.part]
            amax = torch.stack([amax, *(segment_amax(other, (len(other),)) for other in others)]).amax(dim=0)
        layout, named = part.layout(), _by_stored_name(part, _quantized(part, weight, amax, calibration))
        return {name: tensor.reshape(layout[name].shape) for name, tensor in named.items()}

    return make


def _quantized_experts(
    part: QuantizedPart, calibration: Calibration, opened: OpenFiles, *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Quantize one expert at a time, to save memory.

    ModelOpt divides these in float32, whatever their dtype.
    """
    experts = range(part.part.shape[0])

    def expert(i: int) -> Tensor:
        (stored,) = opened.slice_of(part.part)[i : i + 1]
        matrix: Tensor = stored.to(dtype).float()
        return matrix.t().contiguous()

    amax = torch.stack([segment_amax(expert(i), part.part.shape[2:]) for i in experts]).amax(dim=0)
    made = [_by_stored_name(part, _quantized(part, expert(i), amax, calibration)) for i in experts]
    return {
        name: made[0][name].reshape(()) if not layout.shape else torch.stack([each[name].t() for each in made])
        for name, layout in part.layout().items()
    }


def _quantized(part: QuantizedPart, weight: Tensor, amax: Tensor, calibration: Calibration) -> QuantizedWeight[Tensor]:
    """A matrix of one segment."""
    input_amax = None
    if part.format.has_input_scale:
        input_amax = torch.full_like(amax, calibration.input_amax[part.linear.name])
    return part.format.quantize(weight, segments=(len(weight),), weight_amax=amax, input_amax=input_amax)


def _by_stored_name(part: QuantizedPart, quantized: QuantizedWeight[Tensor]) -> dict[str, Tensor]:
    _, stored = stored_as(part.format.name)
    tensors = quantized.tensors()
    return {part.name_of(place): tensors[name] for name, place in stored.fields.items()}


def _read(opened: OpenFiles, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    whole: Tensor = opened.slice_of(stored)[...]
    return whole.to(dtype, copy=True)  # slices must not outlive the next call


def _as_stored(tensor: StoredTensor) -> Change:
    dtype: Any = stored_dtype(tensor.dtype)
    return Change(
        layout={tensor.name: TensorLayout(dtype, tensor.shape)},
        make=lambda opened: {tensor.name: opened.slice_of(tensor)[...]},
    )


def _with_scalar(change: Change, name: str, value: float) -> Change:
    def make(opened: OpenFiles) -> Mapping[str, Tensor]:
        return {**change.make(opened), name: torch.tensor(value, dtype=torch.float32)}

    return Change(layout=change.layout | {name: TensorLayout("float32", ())}, make=make)


FORMAT_VERSION = "0.47.0"  # the ModelOpt release with this format
_BITS = {"FP8": 8, "NVFP4": 4}


def quantization_description(formats: Mapping[str, str], plain: Collection[str], *, has_fp8_kv: bool) -> dict[str, Any]:
    """Fields of hf_quant_config.json. `formats` are by module, `plain` are other modules with a matrix."""
    layers = {module: _layer(name) for module, name in formats.items()}
    kinds = {name: _layer(name) for name in sorted(set(formats.values()))}
    section: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8" if has_fp8_kv else None}
    if len(kinds) == 1:
        section |= next(iter(kinds.values()))
        section["exclude_modules"] = sorted(plain)
    elif kinds:
        section |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return {"producer": {"name": "modelopt", "version": FORMAT_VERSION}, "quantization": section}


def flat_description(description: Mapping[str, Any]) -> dict[str, Any]:
    """The same as `quantization_config` of config.json, with the keys that other loaders read."""
    section = description["quantization"]
    layers: Mapping[str, Mapping[str, Any]] = section.get("quantized_layers", {})
    groups: list[tuple[Mapping[str, Any], list[str]]] = []
    if layers:
        kinds = {str(layer): layer for layer in layers.values()}.values()
        groups = [(kind, sorted(name for name, layer in layers.items() if layer == kind)) for kind in kinds]
    elif section["quant_algo"] is not None:
        groups.append((section, ["Linear"]))
    flat: dict[str, Any] = {
        "config_groups": {f"group_{i}": _group(kind) | {"targets": names} for i, (kind, names) in enumerate(groups)}
    }
    if layers:
        flat["quantized_layers"] = layers
    flat["ignore"] = section.get("exclude_modules", [])
    if section["quant_algo"] is not None:
        flat["quant_algo"] = section["quant_algo"]
    if section["kv_cache_quant_algo"] is not None:
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return flat | {"producer": description["producer"], "quant_method": "modelopt"}


def _layer(format_name: str) -> dict[str, Any]:
    algorithm, _ = stored_as(format_name)
    block = weight_format(format_name).columns_per_block
    return {"quant_algo": algorithm} | ({"group_size": block} if block > 1 else {})


def _group(kind: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"dynamic": False, "num_bits": _BITS[kind["quant_algo"]], "type": "float"}
    if "group_size" in kind:
        values["group_size"] = kind["group_size"]
    return {"input_activations": values, "weights": values}
