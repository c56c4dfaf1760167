"""Linear layers over quantized weights: Q/DQ patterns that TensorRT fuses into FP8 and NVFP4 GEMMs, and plain ones.

The formats and their arithmetic are defined in `formats/`. Stacked linears whose activations share one scale become one
GEMM; otherwise each segment has its own quantization of the same input.
"""

from collections.abc import Callable
from typing import Any, Final

from dflash_trt.backends.tensorrt.dequantization import DEQUANTIZE, scalar_constant
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.inspection import linear_mark
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.formats.base import QuantizedWeight, runs_of_segments, slice_quantized
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
    return [
        slice_quantized(weight, start, stop, lambda tensor, first, last: tensor.rows(first, last))
        for _, start, stop in runs_of_segments(scales, weight.segments)
    ]


def _scalar_columns(weight: QuantizedWeight[HostTensor]) -> list[tuple[float, ...]]:
    """Scales that one GEMM can take only one value of; FP8 weights take one scale per row."""
    columns = [] if weight.input_scale is None else [weight.input_scale.floats()]
    return [*columns, weight.weight_scale.floats()] if isinstance(weight, Nvfp4Weight) else columns


def _weight_only(layers: Layers, x: ITensor, weight: QuantizedWeight[HostTensor]) -> ITensor:
    matrix = DEQUANTIZE[type(weight)](layers, weight, x)
    return _gemm(layers, x, matrix, weight.tensors()["codes"].name)


def _fp8(layers: Layers, x: ITensor, weight: Fp8Weight[HostTensor]) -> ITensor:
    """Static per-tensor quantization of x."""
    if weight.input_scale is not None:
        scale = scalar_constant(layers, weight.input_scale)
        codes = layers.output_of(layers.add_layer("add_quantize", x, scale, layers.trt.DataType.FP8))
        x = layers.dequantize(codes, scale, x.dtype)
    return _weight_only(layers, x, weight)


def _nvfp4(layers: Layers, x: ITensor, weight: Nvfp4Weight[HostTensor]) -> ITensor:
    """Dynamic block scales under a static global scale for x."""
    if weight.input_scale is not None:
        trt, global_scale = layers.trt, scalar_constant(layers, weight.input_scale)
        quantize = layers.add_layer("add_dynamic_quantize", x, 1, BLOCK_SIZE, trt.DataType.FP4, trt.DataType.FP8)
        quantize.set_input(1, global_scale)
        codes, scales = layers.output_of(quantize, 0), layers.output_of(quantize, 1)
        x = layers.dequantize(codes, layers.dequantize(scales, global_scale, x.dtype), x.dtype, axis=1)
    return _weight_only(layers, x, weight)


def _gemm(layers: Layers, x: ITensor, weight: ITensor, name: str) -> ITensor:
    """x @ weight.T, marked for the engine inspector."""
    none, transpose = layers.trt.MatrixOperation.NONE, layers.trt.MatrixOperation.TRANSPOSE
    layer = layers.add_layer("add_matrix_multiply", x, none, weight, transpose)
    layer.metadata = linear_mark(name)
    return layers.output_of(layer)


# By class of weight; the formats of others are refused.
GEMMS: Final[dict[type[QuantizedWeight[Any]], Callable[[Layers, ITensor, Any], ITensor]]] = {
    **dict.fromkeys(DEQUANTIZE, _weight_only),
    Fp8Weight: _fp8,
    Nvfp4Weight: _nvfp4,
}
