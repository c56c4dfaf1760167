"""Linear layers over quantized weights: quantize/dequantize patterns that TensorRT fuses into FP8 and NVFP4 GEMMs.

The formats and their arithmetic are defined in `formats/`. Stacked linears whose activations share one scale
become one GEMM; otherwise each segment has its own quantization of the same input.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any, Final

from dflash_trt.backends.tensorrt.host_tensor import HostTensor, host_floats
from dflash_trt.backends.tensorrt.inspection import linear_mark
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.formats.base import QuantizedWeight, slice_quantized
from dflash_trt.formats.fp8 import Fp8Weight
from dflash_trt.formats.nvfp4 import BLOCK_SIZE, Nvfp4Weight


def quantized_linear(layers: Layers, x: ITensor, weight: QuantizedWeight[HostTensor]) -> ITensor:
    """[N, in] -> [N, out] in x's dtype, without bias."""
    gemm = GEMMS[type(weight)]
    return layers.concat([gemm(layers, x, part) for part in _parts(weight)], 1)


def _parts(weight: QuantizedWeight[HostTensor]) -> list[QuantizedWeight[HostTensor]]:
    """Runs of segments that have one activation scale each (and, for NVFP4, one weight scale)."""
    columns = _scalar_columns(weight)
    scales = [tuple(column[i] for column in columns) for i in range(len(weight.segments))]
    parts, start = [], 0
    for _, run in groupby(zip(scales, weight.segments, strict=True), key=lambda pair: pair[0]):
        stop = start + sum(rows for _, rows in run)
        parts.append(slice_quantized(weight, start, stop, lambda tensor, first, last: tensor.rows(first, last)))
        start = stop
    return parts


def _scalar_columns(weight: QuantizedWeight[HostTensor]) -> list[tuple[float, ...]]:
    """Scales that one GEMM can take only one value of; FP8 weights take one scale per row."""
    columns = [] if weight.input_scale is None else [weight.input_scale.floats()]
    return [*columns, weight.weight_scale.floats()] if isinstance(weight, Nvfp4Weight) else columns


def _fp8(layers: Layers, x: ITensor, weight: Fp8Weight[HostTensor]) -> ITensor:
    """Static per-tensor quantization of x, per-row dequantization of the weight."""
    trt = layers.trt
    if weight.input_scale is not None:
        scale = _scalar(layers, weight.input_scale)
        codes = layers.output_of(layers.add_layer("add_quantize", x, scale, trt.DataType.FP8))
        x = layers.output_of(layers.add_layer("add_dequantize", codes, scale, x.dtype))
    scales = [
        value for value, rows in zip(weight.weight_scale.floats(), weight.segments, strict=True) for _ in range(rows)
    ]
    row_scale = layers.tensor(host_floats(f"{weight.weight_scale.name} per row", scales, (len(scales),)))
    layer = layers.add_layer("add_dequantize", layers.tensor(weight.codes), row_scale, x.dtype)
    layer.axis = 0
    return _gemm(layers, x, layers.output_of(layer), weight.codes.name)


def _nvfp4(layers: Layers, x: ITensor, weight: Nvfp4Weight[HostTensor]) -> ITensor:
    """Dynamic block scales under a static global scale for x; two-level dequantization of the weight.

    TensorRT wants a dequantization's output to have the type of its scale, so the scales are in x's dtype too. Those of
    the weight are multiplied in float32 first: in bfloat16 the product would be of a rounded global scale.
    """
    trt, dtype = layers.trt, x.dtype
    if weight.input_scale is not None:
        x = _nvfp4_activation(layers, x, _scalar(layers, weight.input_scale))
    codes, global_scale = layers.tensor(weight.block_scale), _scalar(layers, weight.weight_scale)
    wide = layers.output_of(layers.add_layer("add_dequantize", codes, global_scale, trt.DataType.FLOAT))
    block_scale = layers.cast_like(wide, x)
    layer = layers.add_layer("add_dequantize", layers.fp4_constant(weight.codes), block_scale, dtype)
    layer.axis = 1
    return _gemm(layers, x, layers.output_of(layer), weight.codes.name)


def _nvfp4_activation(layers: Layers, x: ITensor, global_scale: ITensor) -> ITensor:
    trt = layers.trt
    axis = len(x.shape) - 1
    quantize = layers.add_layer("add_dynamic_quantize", x, axis, BLOCK_SIZE, trt.DataType.FP4, trt.DataType.FP8)
    quantize.set_input(1, global_scale)
    codes, scales = layers.output_of(quantize, 0), layers.output_of(quantize, 1)
    block_scale = layers.output_of(layers.add_layer("add_dequantize", scales, global_scale, x.dtype))
    layer = layers.add_layer("add_dequantize", codes, block_scale, x.dtype)
    layer.axis = axis
    return layers.output_of(layer)


def _gemm(layers: Layers, x: ITensor, weight: ITensor, name: str) -> ITensor:
    """x @ weight.T, marked for the engine inspector."""
    none, transpose = layers.trt.MatrixOperation.NONE, layers.trt.MatrixOperation.TRANSPOSE
    layer = layers.add_layer("add_matrix_multiply", x, none, weight, transpose)
    layer.metadata = linear_mark(name)
    return layers.output_of(layer)


# By class of weight; the formats of others are refused.
GEMMS: Final[dict[type[QuantizedWeight[Any]], Callable[[Layers, ITensor, Any], ITensor]]] = {
    Fp8Weight: _fp8,
    Nvfp4Weight: _nvfp4,
}


def _scalar(layers: Layers, scales: HostTensor) -> ITensor:
    """The first of the scales, which are all equal where this is asked, as a rank 0 constant."""
    return layers.tensor(host_floats(f"{scales.name} scalar", [scales.floats()[0]], ()))
