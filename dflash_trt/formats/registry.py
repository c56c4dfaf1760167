"""Weight formats by name, found as the FORMATS of this package's modules."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module

from torch import Tensor

from dflash_trt import formats
from dflash_trt.core.dtype import dtype_name
from dflash_trt.core.model.decoder import TargetSpec
from dflash_trt.core.model.draft import DraftSpec, engine_weights
from dflash_trt.core.quantization import QuantizationSpec
from dflash_trt.core.weight_spec import WeightSpec, WeightTable, is_linear, segments_of
from dflash_trt.formats.base import QuantizedWeight, T, TensorLayout, WeightFormat, tensor_name


@cache
def weight_formats() -> Mapping[str, WeightFormat]:
    """All formats that an engine can store."""
    modules = [import_module(f"{formats.__name__}.{found.name}") for found in pkgutil.iter_modules(formats.__path__)]
    return {item.name: item for module in modules for item in getattr(module, "FORMATS", ())}


def weight_format(name: str) -> WeightFormat:
    """Raises KeyError for a name that `weight_formats` lacks."""
    return weight_formats()[name]


def format_of(weight: QuantizedWeight[Tensor]) -> WeightFormat:
    """Format of a stored weight; a weight-only format may share the arithmetic of another."""
    known = [item for item in weight_formats().values() if type(weight) is item.weight_type]
    has_input_scale = weight.input_scale is not None
    return next((item for item in known if item.has_input_scale == has_input_scale), known[0])


def format_with(tensors: Mapping[str, Tensor]) -> WeightFormat:
    """Format whose weights have exactly these tensors, by field and dtype."""
    wanted: dict[str, str] = {field: dtype_name(tensor.dtype) for field, tensor in tensors.items()}
    for item in weight_formats().values():
        layout = item.layout((1, item.columns_per_block), (1,))
        if {field: tensor.dtype for field, tensor in layout.items()} == wanted:
            return item
    raise AssertionError(f"no format has {wanted}")


def dequantize(weight: QuantizedWeight[Tensor]) -> Tensor:  # float32 [..., out, in]
    """Dequantize a weight, exactly."""
    return format_of(weight).dequantize(weight)


def quantized_tensors(name: str, table: WeightTable, format_name: str) -> dict[str, TensorLayout]:
    """Layout of one linear layer's tensors by canonical name, in file order; `table` may be a rank's."""
    spec = table[name]
    layout = weight_format(format_name).layout(spec.shape, segments_of(spec))
    return {tensor_name(name, field_name): tensor for field_name, tensor in layout.items()}


def field_spec(spec: WeightSpec, known: WeightFormat, field_name: str, shape: tuple[int, ...]) -> WeightSpec:
    """Spec of one tensor of a quantized linear layer, which is sharded as the layer is, block by block.

    Ranks have one number per segment whole, and what has no columns where columns are divided.
    """
    rows_of = known.weight_type.rows_of
    segments, units = rows_of(field_name, segments_of(spec)), rows_of(field_name, spec.units)
    is_whole = field_name in known.weight_type.per_segment or (
        spec.sharding == "columns" and len(shape) < len(spec.shape)
    )
    sharding = "replicated" if is_whole else spec.sharding
    return replace(spec, shape=shape, segments=segments, units=units, sharding=sharding)


def split_quantized(
    tensors: Mapping[str, T], table: WeightTable, linears: Mapping[str, str]
) -> tuple[dict[str, T], dict[str, QuantizedWeight[T]]]:
    """Split a rank's tensors into unquantized ones and quantized weights; `table` is the rank's."""
    plain = dict(tensors)
    quantized: dict[str, QuantizedWeight[T]] = {}
    for name, format_name in linears.items():
        known, spec = weight_format(format_name), table[name]
        names = {key: tensor_name(name, key) for key in known.layout(spec.shape, segments_of(spec))}
        quantized[name] = known.weight_of(segments_of(spec), {key: plain.pop(stored) for key, stored in names.items()})
    return plain, quantized


def engine_tensors(name: str, weight: QuantizedWeight[Tensor]) -> dict[str, Tensor]:
    """Tensors of a quantized weight by canonical name, in the order of the file."""
    return {tensor_name(name, key): tensor for key, tensor in weight.tensors().items()}


def check_quantization(quantization: QuantizationSpec, target: TargetSpec, draft: DraftSpec | None) -> None:
    """Raises ValueError when the formats, names or lengths do not fit the models."""
    table = engine_weights(target, draft, quantization)
    unknown = sorted(set(quantization.linears.values()) - weight_formats().keys())
    if unknown:
        raise ValueError(f"only formats {', '.join(weight_formats())} (not {', '.join(unknown)})")
    wrong = [name for name in quantization.linears if name not in table or not is_linear(table[name], name)]
    if wrong:
        raise ValueError(f"quantization of linear layers of the models (not {', '.join(wrong)})")
    for kv_scales, spec in ((quantization.target_kv, target), (quantization.draft_kv, draft)):
        num_layers = spec.num_layers if spec is not None else 0
        if kv_scales is not None and len(kv_scales) != num_layers:
            raise ValueError(f"K/V scales for {num_layers} layers (not {len(kv_scales)})")
