"""Decoder layers with the fewest operators for a CPU: on a few rows each costs its dispatch.

Q, K and V of a layer are one GEMM, also in a drafter, whose K and V are slices of another matrix. Q and K are normed
and rotated together. The scale of a layer kept in float16 is multiplied into the norm before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_trt.backends.torch.linear import HalfLinear
from dflash_trt.backends.torch.loading import activation_dtype, with_experts, with_linears
from dflash_trt.backends.torch.moe import separated
from dflash_trt.backends.torch.native.four_bits import stored_linear
from dflash_trt.backends.torch.native.library import CpuKernels
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.backends.torch.quantized_linear import prepare_linear
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.network.decoder import Layer
from dflash_trt.network.feed_forward import Mlp
from dflash_trt.network.mixers.gqa import GqaWeights
from dflash_trt.network.ops import Linear, Ops
from dflash_trt.network.rank_tensors import map_parts, parts_of
from dflash_trt.network.step import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedGqa(GqaWeights[Tensor]):
    """One projection [q; k; v]."""

    qk_norm: Tensor | None  # [heads + kv_heads, D]

    def qkv(
        self, ops: Ops[Tensor], x: Tensor, rope: Any, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:  # views of two tensors
        gqa = self.spec
        heads = ops.split_heads(ops.linear(x, self.projections[0]), gqa.head_dim)
        num_rotated = gqa.num_heads + gqa.num_kv_heads
        qk, v = heads.split_with_sizes((num_rotated, gqa.num_kv_heads), 1)
        assert isinstance(ops, TorchOps)
        qk = ops.norm_rope(qk, self.qk_norm, eps, rope)
        q, k = qk.split_with_sizes((gqa.num_heads, gqa.num_kv_heads), 1)
        return q, k, v


def prepared(
    network: Network[Tensor],
    kernels: CpuKernels | None = None,
    *,
    dtype: torch.dtype | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Network[Tensor]:
    """The network for `TorchOps`; its linear layers use `kernels` where those have a layout for them.

    `dtype` is that of activations (default: the network's). Drafts decide how fast a text comes and never which: the
    drafter's may be rounded to bfloat16, and so may those of a bfloat16 network.
    """
    joined = map_parts(with_experts(network, separated), Layer, _joined)
    operands = activation_dtype(network)
    prepare = partial(prepare_linear, kernels=kernels, operands=operands)
    linears = with_linears(
        joined,
        partial(prepare, rounds_inputs=operands == torch.bfloat16),
        prepare_draft=partial(prepare, rounds_inputs=True),
        dtype=dtype,
        on_read=on_read,
    )
    if kernels is not None:
        store = partial(stored_linear, kernels=kernels, rounds_inputs=operands == torch.bfloat16)
        linears = with_experts(linears, partial(separated, prepare=store))
    return map_parts(linears, Layer, partial(_with_scaled_norms, exchanges_rows=network.mapping.dp_size > 1))


def _joined(layer: Layer[Tensor]) -> Layer[Tensor]:
    mixer = layer.mixer
    if not isinstance(mixer, GqaWeights):
        return layer
    gqa = mixer.spec
    if gqa.has_output_gate or gqa.has_v_norm or gqa.has_joint_qk_norm or gqa.projections != "qkv":
        return layer
    qkv = _joined_rows(mixer.projections)
    norms = (mixer.q_norm, mixer.k_norm)
    if qkv is None or any(norm is not None and norm.dtype != torch.float32 for norm in norms):
        return layer  # PyTorch's norm, for other dtypes, takes one weight for all heads
    qk_norm = None
    if mixer.q_norm is not None and mixer.k_norm is not None:
        qk_norm = torch.cat((mixer.q_norm.expand(gqa.num_heads, -1), mixer.k_norm.expand(gqa.num_kv_heads, -1)))
    return replace(layer, mixer=JoinedGqa(**parts_of(mixer) | {"projections": (qkv,)}, qk_norm=qk_norm))


def _joined_rows(linears: tuple[Linear[Tensor], ...]) -> Linear[Tensor] | None:
    """One layer with the rows of all; None where they cannot be one."""
    if len(linears) == 1:
        return linears[0]
    weights = [linear.weight for linear in linears if not isinstance(linear.weight, QuantizedWeight)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(weights) < len(linears) or len(biases) not in (0, len(linears)):
        return None
    return Linear(weight=torch.cat(weights), bias=torch.cat(biases) if biases else None)


def _with_scaled_norms(layer: Layer[Tensor], *, exchanges_rows: bool) -> Layer[Tensor]:
    """Normed rows that other ranks read have no scale of this rank's."""
    if not layer.feeds_norms_to_linears:
        return layer
    if isinstance(layer.mixer, JoinedGqa):
        norm, qkv = _scaled(layer.attention_norm, layer.mixer.projections[0])
        layer = replace(layer, attention_norm=norm, mixer=replace(layer.mixer, projections=(qkv,)))
    if isinstance(layer.feed_forward, Mlp) and not exchanges_rows:
        norm, gate_up = _scaled(layer.mlp_norm, layer.feed_forward.gate_up)
        layer = replace(layer, mlp_norm=norm, feed_forward=replace(layer.feed_forward, gate_up=gate_up))
    return layer


def _scaled(norm: Tensor, linear: Linear[Tensor]) -> tuple[Tensor, Linear[Tensor]]:
    """Fold the scale, a power of two, into the norm; exact while the norm's weights stay in range."""
    if not isinstance(linear, HalfLinear):
        return norm, linear
    scaled = norm * linear.scale
    if not torch.equal(scaled / linear.scale, norm):
        return norm, linear
    return scaled, replace(linear, scale=1.0)
