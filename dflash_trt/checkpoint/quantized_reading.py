"""One rank's shard of quantized linear layers, from a producer's tensors to those of the engine.

Codes are taken bit for bit. Scales become those of the format: repeated where one stands for several, divided where the
producer stores the reciprocal, in the format's dtype if that holds them exactly. Names and layouts: `formats/base.py`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.producers.base import WORDS
from dflash_trt.checkpoint.quantized_weights import QuantizedPart, QuantizedSource
from dflash_trt.checkpoint.sharding import rank_index
from dflash_trt.checkpoint.tensors import StoredTensor
from dflash_trt.core.dtype import torch_dtype
from dflash_trt.core.errors import CheckpointError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, segment_specs
from dflash_trt.formats.base import tensor_name
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
    if source.format is not None:
        yield from _read_parts(name, spec, source.parts, open_slice, mapping)
        return
    for i, (part, part_spec) in enumerate(zip(source.parts, segment_specs(spec), strict=True)):
        if part.stored is not None:
            yield from _read_parts(f"{name}/{i}", part_spec, (part,), open_slice, mapping)
        else:
            plain: Tensor = open_slice(part.tensors["codes"])[rank_index(part_spec, mapping)]
            yield f"{name}/{i}", plain.to(dtype)


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
    assert parts[0].stored is not None
    known, specs = weight_format(parts[0].stored.format), segment_specs(spec)
    for field in known.layout(spec.shape, [part_spec.shape[0] for part_spec in specs]):
        if field in known.weight_type.per_segment:
            numbers = [_read_scalar(part, field, open_slice) for part in parts]
            yield tensor_name(name, field), torch.tensor(numbers, dtype=torch.float32)
            continue
        read = _read_codes if field == "codes" else _read_scales
        pairs = zip(parts, specs, strict=True)
        pieces = [read(part, field, part_spec, open_slice, mapping) for part, part_spec in pairs]
        joined = torch.cat([piece.view(torch.uint8) for piece in pieces])  # no torch.cat for float8 on a CPU
        yield tensor_name(name, field), joined.view(pieces[0].dtype)


def _read_scalar(part: QuantizedPart, field: str, open_slice: OpenSlice) -> float:
    """Divided in float64: rounded to float32, the result is the one of float32."""
    assert part.stored is not None
    value = read_number(part.tensors[field], open_slice)
    return 1.0 / value if part.stored.fields[field].is_reciprocal else value


def _read_codes(part: QuantizedPart, field: str, spec: WeightSpec, open_slice: OpenSlice, mapping: Mapping) -> Tensor:
    """This rank's shard; refuses NaN."""
    assert part.stored is not None
    stored = part.tensors[field]
    index = rank_index(field_spec(spec, weight_format(part.stored.format), field, stored.shape), mapping)
    tensor: Tensor = open_slice(stored)[index].contiguous()
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
    layout, repeats = known.layout(spec.shape, spec.segments)[field], part.stored.fields[field].repeats
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
        exact = exact.reshape(()).expand(layout.shape)
    else:
        exact = exact.reshape(*layout.shape[:-1], layout.shape[-1] // repeats).repeat_interleave(repeats, dim=-1)
    return exact[rank_index(field_spec(spec, known, field, layout.shape), mapping)].contiguous()


def _whole(stored: StoredTensor, open_slice: OpenSlice) -> Tensor:
    tensor: Tensor = open_slice(stored)[...]
    return tensor


def _wrong(stored: StoredTensor, *, expected: str, found: str) -> CheckpointError:
    return CheckpointError.about(f"tensor '{stored.name}'", expected=expected, found=found, hint=_EXPORT_AGAIN)
