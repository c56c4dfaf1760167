"""Constants and fields of an `Experts` node: weights as bytes in any format, and prepared scales.

Bytes are INT8 constants: TensorRT has no UINT8 constants, allows FP4 and FP8 tensors few uses, and converts INT8
nowhere. Kernels and preparation are the GPU backend's (`backends/cuda/packed.py`).
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.cuda.packed import expert_matrices, router_kind
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
    layers: Layers, experts: StackedExperts[HostTensor], moe: Moe, *, of_f: ITensor
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
        "routing_scale": moe.routing_scale,
        "limit": moe.limit or NOT_READ,
        "alpha": moe.alpha or NOT_READ,
    }
    bias = experts.choice_bias
    given = {"choice_bias": layers.floats([0.0], (1,)) if bias is None else layers.tensor(bias)}
    matrices = expert_matrices(_viewed_experts(experts))
    for prefix, linear, matrix in zip(("gate_up", "down"), (experts.gate_up, experts.down), matrices, strict=True):
        given |= {f"{prefix}_{name}": tensor for name, tensor in _inputs(layers, linear, matrix, of_f).items()}
        fields |= {
            f"{prefix}_form": matrix.form,
            f"{prefix}_has_row_scale": int(matrix.row_scale is not None),
            f"{prefix}_has_input_scale": int(matrix.input_scale is not None),
            f"{prefix}_has_bias": int(matrix.bias is not None),
        }
    return given, fields


def _inputs(layers: Layers, linear: Linear[HostTensor], matrix: PackedMatrix, of_f: ITensor) -> dict[str, ITensor]:
    """Inputs that a format lacks have one element, which is not read."""
    name = linear.name
    return {
        "codes": _bytes(layers, name, linear, matrix.codes),
        "block_scale": _bytes(layers, f"{name}.block_scale", linear, _or_one(matrix.block_scale, torch.int8, 3)),
        "block_rows": _constant(layers, f"{name}.block_rows", linear, _or_one(matrix.block_rows, torch.int32, 1)),
        "row_scale": _constant(layers, f"{name}.row_scale", linear, _or_one(matrix.row_scale, torch.float32, 2)),
        "input_scale": _constant(layers, f"{name}.input_scale", linear, _or_one(matrix.input_scale, torch.float32, 2)),
        "bias": _absent_bias(layers, of_f) if matrix.bias is None else layers.tensor(linear.bias),
    }


def _absent_bias(layers: Layers, of_f: ITensor) -> ITensor:
    return layers.cast_like(layers.floats([0.0], (1, 1)), of_f)


def _or_one(tensor: Tensor | None, dtype: torch.dtype, rank: int) -> Tensor:
    return torch.zeros((1,) * rank, dtype=dtype) if tensor is None else tensor


def _constant(layers: Layers, name: str, linear: Linear[HostTensor], tensor: Tensor) -> ITensor:
    return layers.tensor(_hosted(name, linear, tensor))


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
