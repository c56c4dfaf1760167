"""Quantized weights as layers that dequantize them: constants stay packed in the plan.

The formats and their arithmetic are defined in `formats/`. Weights are matrices [out, in]; a node has those of experts.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dflash_trt.backends.tensorrt.host_tensor import HostTensor, host_array, host_floats
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.fp8 import Fp8RowWeight, Fp8Weight
from dflash_trt.formats.fp8_block import BLOCK_SIZE as FP8_BLOCK_SIZE
from dflash_trt.formats.fp8_block import Fp8BlockWeight
from dflash_trt.formats.int4 import BLOCK_SIZE as INT4_BLOCK_SIZE
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.mxfp4 import Mxfp4Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight


def scalar_constant(layers: Layers, scales: HostTensor) -> ITensor:
    """The first of the scales, which are all equal where this is asked, as a rank 0 constant."""
    return layers.tensor(host_floats(f"{scales.name} scalar", [scales.floats()[0]], ()))


def _fp8(layers: Layers, weight: Fp8Weight[HostTensor], like: ITensor) -> ITensor:
    scale = layers.tensor(_scale_of_rows(weight.weight_scale, weight.segments))
    return layers.dequantize(layers.tensor(weight.codes), scale, like.dtype, axis=0)


def _fp8_rows(layers: Layers, weight: Fp8RowWeight[HostTensor], like: ITensor) -> ITensor:
    scale = layers.tensor(weight.weight_scale)
    return layers.dequantize(layers.tensor(weight.codes), scale, like.dtype, axis=0)


def _fp8_block(layers: Layers, weight: Fp8BlockWeight[HostTensor], like: ITensor) -> ITensor:
    """TensorRT's blocks are whole; where some are not, scales are gathered for every element."""
    codes, scales = weight.codes, weight.block_scale
    columns = codes.shape[1]
    if columns % FP8_BLOCK_SIZE == 0 and all(rows % FP8_BLOCK_SIZE == 0 for rows in weight.segments):
        layer = layers.add_layer("add_dequantize", layers.tensor(codes), layers.tensor(scales), like.dtype)
        layer.block_shape = (FP8_BLOCK_SIZE, FP8_BLOCK_SIZE)
        return layers.output_of(layer)
    of_rows = _block_of_rows(weight.segments)
    of_columns = np.arange(columns, dtype=np.int32) // FP8_BLOCK_SIZE
    scale = layers.tensor(scales)
    for axis, blocks in enumerate((of_rows, of_columns)):
        scale = layers.gather(scale, layers.tensor(host_array(f"{codes.name} blocks {axis}", blocks)), axis)
    wide = layers.dequantize_fp8(layers.tensor(codes))
    return layers.cast_like(layers.binary("PROD", wide, scale), like)


def _nvfp4(layers: Layers, weight: Nvfp4Weight[HostTensor], like: ITensor) -> ITensor:
    """Dequantize with scales in `like`'s type: TensorRT ties the output type to the scale's.

    They are multiplied in float32 first: in bfloat16 the product would be of a rounded global scale.
    """
    block_scale = layers.tensor(weight.block_scale)
    is_one = len(set(weight.weight_scale.floats())) == 1
    scale = (
        scalar_constant(layers, weight.weight_scale)
        if is_one
        else layers.tensor(_scale_of_rows(weight.weight_scale, weight.segments))
    )
    wide = layers.dequantize(block_scale, scale, layers.trt.DataType.FLOAT, axis=None if is_one else 0)
    return layers.dequantize(_fp4_matrix(layers, weight.codes), layers.cast_like(wide, like), like.dtype, axis=1)


def _mxfp4(layers: Layers, weight: Mxfp4Weight[HostTensor], like: ITensor) -> ITensor:
    powers = weight.block_scale
    scale = layers.cast(layers.constant_of_bits(powers, "E8M0", powers.shape), "float32")
    return layers.dequantize(_fp4_matrix(layers, weight.codes), layers.cast_like(scale, like), like.dtype, axis=1)


def _int4(layers: Layers, weight: Int4Weight[HostTensor], like: ITensor) -> ITensor:
    """TensorRT's INT4 is two's complement, while a stored nibble is the integer + 8: 8 more or less."""
    codes, scales = weight.codes, layers.cast_like(layers.tensor(weight.block_scale), like)
    rows, blocks = scales.shape
    nibbles = layers.constant_of_bits(codes, "INT4", (rows, 2 * codes.shape[1]))
    integers = layers.dequantize(nibbles, layers.floats([1.0]), layers.trt.DataType.FLOAT)
    offset = layers.where(
        layers.binary("LESS", integers, 0.0), layers.floats([8.0], (1, 1)), layers.floats([-8.0], (1, 1))
    )
    stored = layers.cast_like(layers.binary("SUM", integers, offset), like)
    by_block = layers.reshape(stored, (rows, blocks, INT4_BLOCK_SIZE))
    return layers.reshape(layers.binary("PROD", by_block, layers.reshape(scales, (rows, blocks, 1))), (rows, -1))


# By class of weight; formats that are not here are refused.
DEQUANTIZE: Final[dict[type[QuantizedWeight[Any]], Callable[[Layers, Any, ITensor], ITensor]]] = {
    Fp8Weight: _fp8,
    Fp8RowWeight: _fp8_rows,
    Fp8BlockWeight: _fp8_block,
    Nvfp4Weight: _nvfp4,
    Mxfp4Weight: _mxfp4,
    Int4Weight: _int4,
}


def _fp4_matrix(layers: Layers, codes: HostTensor) -> ITensor:
    rows, pairs = codes.shape
    return layers.constant_of_bits(codes, "FP4", (rows, 2 * pairs))


def _scale_of_rows(scales: HostTensor, segments: tuple[int, ...]) -> HostTensor:
    """float32 [segments] -> [rows]."""
    return host_array(f"{scales.name} per row", np.repeat(np.array(scales.floats(), np.float32), segments))


def _block_of_rows(segments: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """The row of scales of every row; each segment begins a block."""
    starts, blocks = 0, []
    for rows in segments:
        blocks.append(starts + np.arange(rows, dtype=np.int32) // FP8_BLOCK_SIZE)
        starts += -(-rows // FP8_BLOCK_SIZE)
    return np.concatenate(blocks)
