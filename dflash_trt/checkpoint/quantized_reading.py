"""One rank's shard of quantized linear layers, from a producer's tensors to the engine's.

Codes are copied bit for bit. Scales are converted to the format's: repeated where one stands for several, divided where
the producer stores the reciprocal, in the format's dtype if that holds them exactly. Names and layouts:
`formats/base.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.producers.base import WORDS
from dflash_trt.checkpoint.quantized_weights import QuantizedPart, QuantizedSource, rows_per_block
from dflash_trt.checkpoint.sharding import expert_ranks, rank_experts, rank_index, shard
from dflash_trt.checkpoint.tensors import StoredTensor
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, rank_shard, segment_specs, segments_of
from dflash_trt.formats.base import WeightFormat, tensor_name
from dflash_trt.formats.registry import field_spec, weight_format

_EXPORT_AGAIN = "Export the checkpoint again."

OpenSlice = Callable[[StoredTensor], Any]  # the stored tensor, to be indexed as safetensors' slices are


def read_quantized(
    name: str, spec: WeightSpec, source: QuantizedSource, open_slice: OpenSlice, *, dtype: torch.dtype, mapping: Mapping
) -> Iterator[tuple[str, Tensor]]:
    """Yield the engine tensors of a quantized linear layer, in the order of its format's layout.

    Parts of different formats come one by one, as layers `NAME/0`, `NAME/1`, ...

    Raises:
        CheckpointError: a scale or a code is not finite, a scale is not positive, or its dtype here cannot hold it.
    """
    if spec.num_experts:
        yield from _read_experts(name, spec, source.parts, open_slice, mapping)
        return
    if source.format is not None:
        yield from _read_parts(name, spec, source.parts, open_slice, mapping)
        return
    for i, (part, part_spec) in enumerate(zip(source.parts, segment_specs(spec), strict=True)):
        if part.stored is not None:
            yield from _read_parts(f"{name}/{i}", part_spec, (part,), open_slice, mapping)
        else:
            plain: Tensor = _rows_of(part, open_slice)(part.tensors["codes"])[rank_index(part_spec, mapping)]
            yield f"{name}/{i}", plain.to(dtype)


def read_dequantized(
    spec: WeightSpec, source: QuantizedSource, open_slice: OpenSlice, *, dtype: torch.dtype, mapping: Mapping
) -> Tensor:  # rank_shard(spec, mapping).shape
    """This rank's shard of a matrix that is unquantized in the engine. Raises as `read_quantized`."""
    assert source.format is not None, "a matrix of one part has one format"
    known = weight_format(source.format)
    fields = {
        field: _read_field(field, spec, source.parts, open_slice, Mapping())
        for field in known.layout(spec.shape, segments_of(spec))
    }
    return shard(known.dequantize(known.weight_of(segments_of(spec), fields)).to(dtype), spec, mapping)


def read_number(stored: StoredTensor, open_slice: OpenSlice) -> float:
    """Read a scalar scale.

    Raises:
        CheckpointError: it is not finite and positive.
    """
    value = float(_whole(stored, open_slice).float().reshape(()))
    if not (0.0 < value < float("inf")):
        raise _wrong(stored, expected="a finite, positive scale", found=f"{value:g}")
    return value


def _read_parts(
    name: str, spec: WeightSpec, parts: tuple[QuantizedPart, ...], open_slice: OpenSlice, mapping: Mapping
) -> Iterator[tuple[str, Tensor]]:
    for field in _format(parts).layout(spec.shape, segments_of(spec)):
        yield tensor_name(name, field), _read_field(field, spec, parts, open_slice, mapping)


def _read_experts(
    name: str, spec: WeightSpec, parts: tuple[QuantizedPart, ...], open_slice: OpenSlice, mapping: Mapping
) -> Iterator[tuple[str, Tensor]]:
    """This rank's experts; memory holds one in addition to the tensor that is being filled."""
    share, expert = rank_shard(spec, mapping), replace(spec, shape=spec.shape[1:], num_experts=0)
    mine, ranks = rank_experts(spec.num_experts, mapping), expert_ranks(mapping)
    num_parts = len(parts) // spec.num_experts
    for field, layout in _format(parts).layout(share.shape, segments_of(share)).items():
        tensor = torch.empty(layout.shape, dtype=torch_dtype(layout.dtype))
        for row, i in zip(tensor, mine, strict=True):
            if num_parts:
                of_expert = parts[i * num_parts : (i + 1) * num_parts]
                row.copy_(_read_field(field, expert, of_expert, open_slice, ranks))
            else:
                row.copy_(_read_field(field, expert, parts, _of_expert(parts[0], open_slice, i), ranks))
        yield tensor_name(name, field), tensor


def _rows_of(part: QuantizedPart, open_slice: OpenSlice) -> OpenSlice:
    """Opens tensors of a part, of which only its `rows` are given."""
    if part.rows is None:
        return open_slice
    rows, num_rows = part.rows, part.tensors["codes"].shape[0]
    fields = {tensor.name: field for field, tensor in part.tensors.items()}

    def gathered(stored: StoredTensor) -> Tensor:
        whole = _whole(stored, open_slice)
        block = rows_per_block(part, fields[stored.name], whole.numel())
        if block is None:
            return whole
        spans = [slice(span.start // block, -(-span.stop // block)) for span in rows.spans(0, num_rows)]
        return torch.cat([whole[span].view(torch.uint8) for span in spans]).view(whole.dtype)

    return gathered


def _of_expert(part: QuantizedPart, open_slice: OpenSlice, index: int) -> OpenSlice:
    """Opens one expert's part of a tensor of all experts; numbers refer to all."""

    def opened(stored: StoredTensor) -> Tensor:
        if stored.num_elements == 1:
            return _whole(stored, open_slice)
        tensor: Tensor = open_slice(stored)[index : index + 1][0]
        return tensor.t() if part.is_transposed and tensor.dim() == 2 else tensor

    return opened


def _format(parts: tuple[QuantizedPart, ...]) -> WeightFormat:
    assert parts[0].stored is not None
    return weight_format(parts[0].stored.format)


def _read_field(
    field: str, spec: WeightSpec, parts: tuple[QuantizedPart, ...], open_slice: OpenSlice, mapping: Mapping
) -> Tensor:
    """One tensor of a matrix, of which each part holds a segment, or the only part all."""
    if field in _format(parts).weight_type.per_segment:
        return torch.tensor([_read_scalar(part, field, open_slice) for part in parts], dtype=torch.float32)
    read = _read_codes if field == "codes" else _read_scales
    specs = (spec,) if len(parts) == 1 else segment_specs(spec)
    pairs = zip(parts, specs, strict=True)
    pieces = [read(part, field, part_spec, _rows_of(part, open_slice), mapping) for part, part_spec in pairs]
    joined = torch.cat([piece.view(torch.uint8) for piece in pieces])  # no torch.cat for float8 on a CPU
    return joined.view(pieces[0].dtype)


def _read_scalar(part: QuantizedPart, field: str, open_slice: OpenSlice) -> float:
    """Divided in float64: rounded to float32, the result is the one of float32."""
    assert part.stored is not None
    value = read_number(part.tensors[field], open_slice)
    return 1.0 / value if part.stored.fields[field].is_reciprocal else value


def _read_codes(part: QuantizedPart, field: str, spec: WeightSpec, open_slice: OpenSlice, mapping: Mapping) -> Tensor:
    """This rank's shard; refuses NaN."""
    assert part.stored is not None
    stored = part.tensors[field]
    shape = tuple(reversed(stored.shape[1:])) if part.is_transposed else stored.shape
    cut = field_spec(spec, weight_format(part.stored.format), field, shape)
    whole: Any = open_slice(stored)
    tensor: Tensor = shard(whole, cut, mapping) if len(cut.segments) > 1 else whole[rank_index(cut, mapping)]
    tensor = tensor.contiguous()
    if stored.dtype in WORDS:
        return tensor.view(torch.uint8)
    if stored.dtype == "F8_E4M3":
        num_wrong = int(((tensor.view(torch.uint8) & 0x7F) == 0x7F).sum())
        if num_wrong:
            raise _wrong(stored, expected="finite E4M3 values", found=f"{num_wrong} codes that are NaN")
    return tensor


def _read_scales(part: QuantizedPart, field: str, spec: WeightSpec, open_slice: OpenSlice, mapping: Mapping) -> Tensor:
    """This rank's shard of the scales of rows or blocks, as the format has them."""
    assert part.stored is not None
    stored, known = part.tensors[field], weight_format(part.stored.format)
    layout, repeats = known.layout(spec.shape, segments_of(spec))[field], part.stored.fields[field].repeats
    tensor, dtype = _whole(stored, open_slice), torch_dtype(layout.dtype)
    is_wrong = ~(tensor.float().isfinite() & ~tensor.float().signbit())
    if bool(is_wrong.any()):
        found = f"{int(is_wrong.sum())} codes that are NaN or of the wrong sign"
        raise _wrong(
            stored, expected="finite E4M3 values" if stored.dtype == "F8_E4M3" else "finite scales", found=found
        )
    exact = tensor.to(dtype)
    if not torch.equal(exact.float(), tensor.float()):
        found = f"scales in {stored.dtype} that it rounds"
        raise _wrong(stored, expected=f"scales that {layout.dtype} holds exactly", found=found)
    if tensor.numel() == 1:
        exact = exact.reshape((1,) * len(layout.shape)).repeat(layout.shape)
    else:
        exact = exact.reshape(*layout.shape[:-1], layout.shape[-1] // repeats).repeat_interleave(repeats, dim=-1)
    return shard(exact, field_spec(spec, known, field, layout.shape), mapping).contiguous()


def _whole(stored: StoredTensor, open_slice: OpenSlice) -> Tensor:
    tensor: Tensor = open_slice(stored)[...]
    return tensor


def _wrong(stored: StoredTensor, *, expected: str, found: str) -> CheckpointError:
    return CheckpointError.about(f"tensor '{stored.name}'", expected=expected, found=found, hint=_EXPORT_AGAIN)
