"""Weights in the layout of `packed_product.py`'s kernels: packed, with scales prepared at load."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.errors import ConfigError
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight, repeated_by_segment, row_scale, runs_of_one_input, slice_quantized
from dflash_trt.formats.fp8 import Fp8RowWeight, Fp8Weight
from dflash_trt.formats.fp8_block import Fp8BlockWeight
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.mxfp4 import Mxfp4Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.kernels.launch_rules import FP8, FP8_BLOCK, INT4, INT8, MXFP4, NVFP4, PLAIN
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.routing_launch import RouterKind
from dflash_trt.network.ops import Linear, StackedExperts

FORMS: Final[dict[type[QuantizedWeight[Any]], int]] = {
    Fp8Weight: FP8,
    Fp8RowWeight: FP8,
    Fp8BlockWeight: FP8_BLOCK,
    Mxfp4Weight: MXFP4,
    Nvfp4Weight: NVFP4,
    Int4Weight: INT4,
    Int8Weight: INT8,  # of experts: a single layer has a kernel of its own
}


def form_of(weight_type: type[QuantizedWeight[Any]]) -> int:
    """Raises ConfigError for a class whose activations these kernels do not quantize."""
    if weight_type not in FORMS:
        expected = ", ".join(kind.__name__ for kind in FORMS)
        hint = "Choose another format for experts, or leave deterministic out."
        raise ConfigError.about("packed weights", expected=expected, found=weight_type.__name__, hint=hint)
    return FORMS[weight_type]


def packed_matrix(linear: Linear[Tensor]) -> PackedMatrix:
    """One matrix, or the matrices of a layer's experts. Reads scales back to the host.

    Raises:
        ValueError: no kernel reads such a tensor.
    """
    weight = linear.weight
    bias = None if linear.bias is None else dense(linear.bias)
    if not isinstance(weight, QuantizedWeight):
        matrix = PackedMatrix(form=PLAIN, codes=dense(weight), bias=bias)
    else:
        tensors = weight.tensors()
        block_scale = tensors.get("block_scale")
        matrix = PackedMatrix(
            form=form_of(type(weight)),
            codes=dense(tensors["codes"]),
            block_scale=None if block_scale is None else dense(block_scale),
            block_rows=_block_rows(weight),
            row_scale=_row_scale(weight),
            input_scale=_input_scale(weight),
            bias=bias,
        )
    matrix.check()
    return matrix


def parts_of_one_input(linear: Linear[Tensor], weight: QuantizedWeight[Tensor]) -> Iterator[Linear[Tensor]]:
    """The layer in runs of segments whose activations are quantized with the same scale."""
    for _, start, stop in runs_of_one_input(weight):
        part = slice_quantized(weight, start, stop, lambda tensor, first, end: tensor[first:end])
        yield Linear(weight=part, bias=None if linear.bias is None else linear.bias[start:stop])


def expert_matrices(experts: StackedExperts[Tensor]) -> tuple[PackedMatrix, PackedMatrix]:
    """gate_up and down of a layer's experts; a factor of an expert is one of all rows of its down.

    Raises:
        ValueError: no kernel reads such a tensor.
    """
    gate_up, down = packed_matrix(experts.gate_up), packed_matrix(experts.down)
    if experts.expert_scales is None:
        return gate_up, down
    here = experts.expert_scales[experts.first_expert : experts.first_expert + experts.num_experts]
    scales = here.float()[:, None].expand(down.codes.shape[:2])
    return gate_up, replace(
        down,
        row_scale=scales.contiguous() if down.row_scale is None else down.row_scale * scales,
        bias=None if down.bias is None else down.bias * here[:, None],
    )


def router_kind(moe: Moe) -> RouterKind:
    """Factors of experts are in their weights already (`expert_matrices`)."""
    return "softmax_top_k" if moe.routing == "scaled_softmax_top_k" else moe.routing


def dense(tensor: Tensor) -> Tensor:
    """As `check_tensor` wants it. A segment's rows may begin anywhere in the layer's tensor."""
    dense = tensor.contiguous()
    return dense.clone() if dense.data_ptr() % 16 else dense


def _row_scale(weight: QuantizedWeight[Tensor]) -> Tensor | None:  # float32 [..., out]
    """The scales of weights and inputs together."""
    scale = None if weight.weight_scale is None else row_scale(weight)
    if weight.input_scale is None:
        return None if scale is None else dense(scale)
    of_inputs = repeated_by_segment(weight.input_scale, weight.segments)
    return of_inputs if scale is None else scale * of_inputs


def _input_scale(weight: QuantizedWeight[Tensor]) -> Tensor | None:  # float32 [..., 1 or segments]
    scale = weight.input_scale
    if scale is None:
        return None
    on_host = scale.cpu()
    is_shared = bool((on_host == on_host[..., :1]).all())
    return dense(scale[..., :1] if is_shared else scale)


def _block_rows(weight: QuantizedWeight[Tensor]) -> Tensor | None:  # int32 [out]
    if not isinstance(weight, Fp8BlockWeight):
        return None
    rows_per_block, rows, first = weight.rows_per_block["block_scale"], [], 0
    for num_rows, num_blocks in zip(weight.segments, weight.rows_of("block_scale", weight.segments), strict=True):
        rows.append(first + torch.arange(num_rows, dtype=torch.int32) // rows_per_block)
        first += num_blocks
    return torch.cat(rows).to(weight.block_scale.device)
