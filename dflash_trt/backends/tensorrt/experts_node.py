"""Constants and fields of `Experts` and `Linear` nodes: weights as bytes in any format, and prepared scales.

Bytes are INT8 constants: TensorRT has no UINT8 constants, allows FP4 and FP8 tensors few uses, and converts INT8
nowhere. Kernels and preparation are the GPU backend's (`backends/cuda/packed.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.cuda.packed import expert_matrices, packed_matrix, parts_of_one_input, router_kind
from dflash_trt.backends.tensorrt.host_tensor import HostTensor
from dflash_trt.backends.tensorrt.host_views import host_tensor, torch_view
from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.kernels.experts_launch import ACTIVATIONS
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.routing_launch import KINDS
from dflash_trt.network.ops import Linear, StackedExperts

NOT_READ: Final = 1.0  # limit and alpha of another activation


def experts_node(
    layers: Layers, experts: StackedExperts[HostTensor], moe: Moe, *, of_f: ITensor, has_fixed_tiles: bool
) -> tuple[dict[str, ITensor], dict[str, float]]:
    """Inputs but for `x` and `logits`, by name, and all fields."""
    fields: dict[str, float] = {
        "first_expert": experts.first_expert,
        "num_chosen": moe.num_experts_per_token,
        "routing": KINDS[router_kind(moe)],
        "normalizes": int(moe.normalizes_top_k),
        "has_choice_bias": int(experts.choice_bias is not None),
        "num_groups": moe.num_groups,
        "num_chosen_groups": moe.num_chosen_groups,
        "activation": ACTIVATIONS[moe.activation],
        "scales_inputs": int(moe.scales_inputs),
        "has_fixed_tiles": int(has_fixed_tiles),
        "routing_scale": moe.routing_scale,
        "limit": moe.limit or NOT_READ,
        "alpha": moe.alpha or NOT_READ,
    }
    bias = experts.choice_bias
    given = {"choice_bias": layers.floats([0.0], (1,)) if bias is None else layers.tensor(bias)}
    matrices = expert_matrices(_viewed_experts(experts))
    for prefix, linear, matrix in zip(("gate_up", "down"), (experts.gate_up, experts.down), matrices, strict=True):
        inputs = _inputs(layers, linear, matrix, of_f, name=linear.name)
        given |= {f"{prefix}_{name}": tensor for name, tensor in inputs.items()}
        fields |= {f"{prefix}_{name}": value for name, value in _fields(matrix).items()}
    return given, fields


def linear_nodes(
    layers: Layers, linear: Linear[HostTensor], *, of_f: ITensor
) -> Iterator[tuple[dict[str, ITensor], dict[str, float]]]:
    """Inputs but for `x`, and all fields, of a node for each run of segments whose inputs share a scale."""
    viewed = _viewed(linear)
    parts = parts_of_one_input(viewed, viewed.weight) if isinstance(viewed.weight, QuantizedWeight) else (viewed,)
    for index, part in enumerate(parts):
        matrix = packed_matrix(part)
        name = f"{linear.name}.{linear.first_row}.{index}"
        yield _inputs(layers, linear, matrix, of_f, name=name), _fields(matrix)


def _fields(matrix: PackedMatrix) -> dict[str, float]:
    return {
        "form": matrix.form,
        "has_row_scale": int(matrix.row_scale is not None),
        "has_input_scale": int(matrix.input_scale is not None),
        "has_bias": int(matrix.bias is not None),
    }


def _inputs(
    layers: Layers, linear: Linear[HostTensor], matrix: PackedMatrix, of_f: ITensor, *, name: str
) -> dict[str, ITensor]:
    """Inputs that a format lacks have one element, which is not read."""
    rank = matrix.codes.dim()  # one more for experts

    def constant(part: str, tensor: Tensor | None, dtype: torch.dtype, rank: int) -> ITensor:
        return layers.tensor(_hosted(f"{name}.{part}", linear, _or_one(tensor, dtype, rank)))

    bias = layers.cast_like(layers.floats([0.0], (1,) * (rank - 1)), of_f)
    return {
        "codes": _bytes(layers, name, linear, matrix.codes),
        "block_scale": _bytes(layers, f"{name}.block_scale", linear, _or_one(matrix.block_scale, torch.int8, rank)),
        "block_rows": constant("block_rows", matrix.block_rows, torch.int32, 1),
        "row_scale": constant("row_scale", matrix.row_scale, torch.float32, rank - 1),
        "input_scale": constant("input_scale", matrix.input_scale, torch.float32, rank - 1),
        "bias": bias if matrix.bias is None else constant("bias", matrix.bias, matrix.bias.dtype, rank - 1),
    }


def _or_one(tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
    return torch.zeros((1,) * rank, dtype=dtype) if tensor is None else tensor


def _bytes(layers: Layers, name: str, linear: Linear[HostTensor], tensor: Tensor) -> ITensor:
    *rows, columns = tensor.shape
    host = _hosted(name, linear, tensor)
    return layers.constant_of_bits(host, "INT8", (*rows, columns * tensor.itemsize))


def _hosted(name: str, linear: Linear[HostTensor], tensor: Tensor) -> HostTensor:
    """Views of the weight keep its memory alive through `linear`."""
    return replace(host_tensor(name, tensor), owner=(tensor, linear))


def _viewed_experts(experts: StackedExperts[HostTensor]) -> StackedExperts[Tensor]:
    """The tensors of the experts that the kernels read."""
    scales = experts.expert_scales
    return StackedExperts(
        router=Linear(weight=torch.empty(0)),  # a linear of its own
        num_experts=experts.num_experts,
        first_expert=experts.first_expert,
        expert_scales=None if scales is None else torch_view(scales),
        gate_up=_viewed(experts.gate_up),
        down=_viewed(experts.down),
    )


def _viewed(linear: Linear[HostTensor]) -> Linear[Tensor]:
    weight = linear.weight
    return Linear(
        weight=weight.map_tensors(lambda _, tensor: torch_view(tensor))
        if isinstance(weight, QuantizedWeight)
        else torch_view(weight),
        bias=None if linear.bias is None else torch_view(linear.bias),
        name=linear.name,
    )
