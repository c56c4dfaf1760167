"""A mixture of experts in plain PyTorch: the choice of experts, and an expert's rows in one GEMM.

Definitions: `Qwen3MoeSparseMoeBlock`, `GptOssMLP` and `DeepseekV3TopkRouter` of transformers. The host reads the choice
and runs the chosen experts; a GPU has kernels that need not ask it (`backends/cuda/experts.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.fixed_shapes import Pointwise, directly
from dflash_trt.backends.torch.linear import apply_linear
from dflash_trt.backends.torch.quantized_linear import apply_quantized, dequantize
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight, expert_of
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.network.ops import Experts, Linear, StackedExperts

_NEGLIGIBLE: Final = 1e-20  # added to a sum of sigmoids, which may underflow

ApplyLinear = Callable[[Tensor, Linear[Tensor]], Tensor]  # x [N, in], one expert's linear -> [N, out]
PrepareLinear = Callable[[Linear[Tensor]], Linear[Tensor] | None]  # None: not taken
Activate = Callable[[Tensor, Moe], Tensor]  # see `activated`


@dataclass(frozen=True, kw_only=True, slots=True)
class SeparateExperts(Experts[Tensor]):
    """Experts as separate linear layers, possibly in the layout that a CPU computes with (`torch_linear`)."""

    mlps: tuple[tuple[Linear[Tensor], Linear[Tensor]], ...]  # gate_up, down


@dataclass(frozen=True, slots=True)
class Choice:
    """Per row the experts chosen, best first, and how much of each result it takes."""

    expert_ids: Tensor  # int64 [N, chosen]
    weights: Tensor  # F [N, chosen]


def chosen_experts(
    logits: Tensor,  # [N, E]
    moe: Moe,
    choice_bias: Tensor | None = None,  # float32 [E]
    scales: Tensor | None = None,  # [E]
) -> Choice:
    """The router's decision, in the order of operations of `Moe.routing`; ties go to the lower expert."""
    if moe.routing == "sigmoid_top_k":
        return _chosen_by_sigmoids(logits, moe, choice_bias)
    if moe.routing == "top_k_softmax":
        best, expert_ids = _largest(logits, moe.num_experts_per_token)
        return Choice(expert_ids, best.softmax(dim=-1))
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, expert_ids = _largest(probabilities, moe.num_experts_per_token)
    if moe.normalizes_top_k:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if scales is not None:
        weights = weights * scales[expert_ids]
    return Choice(expert_ids, weights.to(logits.dtype))


def _chosen_by_sigmoids(logits: Tensor, moe: Moe, choice_bias: Tensor | None) -> Choice:
    scores = logits.float().sigmoid()
    choice_scores = scores if choice_bias is None else scores + choice_bias
    if moe.num_groups > 1:
        groups = choice_scores.view(len(logits), moe.num_groups, -1)
        best_two, _ = _largest(groups, 2)
        _, group_ids = _largest(best_two.sum(-1), moe.num_chosen_groups)
        is_open = torch.zeros(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, group_ids, True)
        choice_scores = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    _, expert_ids = _largest(choice_scores, moe.num_experts_per_token)
    weights = scores.gather(1, expert_ids)
    if moe.normalizes_top_k:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NEGLIGIBLE)
    return Choice(expert_ids, (weights * moe.routing_scale).to(logits.dtype))


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """torch.topk with a rule for ties."""
    ordered, indices = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], indices[..., :count]


def apply_expert(x: Tensor, linear: Linear[Tensor]) -> Tensor:
    linear = unpacked_expert(linear, x.dtype)
    return apply_quantized(x, linear) if isinstance(linear.weight, QuantizedWeight) else apply_linear(x, linear)


def unpacked_expert(linear: Linear[Tensor], dtype: torch.dtype) -> Linear[Tensor]:
    """A quantized expert stays packed, and is dequantized for a call alone: no memory holds all of them.

    That of INT8 is multiplied as it is.
    """
    if not isinstance(linear.weight, QuantizedWeight) or isinstance(linear.weight, Int8Weight):
        return linear
    return replace(linear, weight=dequantize(linear.weight, dtype, is_kept=False))


def run_chosen_experts(
    x: Tensor,
    experts: Experts[Tensor],
    moe: Moe,
    choice: Choice,
    apply: ApplyLinear = apply_expert,
    activate: Activate | None = None,  # default: `activated`
) -> Tensor:
    """[N, H] -> [N, H]: an expert's rows together, no expert without rows.

    Other ranks' experts add nothing. A row adds up its results in the order of the experts, independently of other
    rows.
    """
    activate = activate or activated
    num_chosen = choice.expert_ids.shape[1]
    places = choice.expert_ids.flatten().argsort(stable=True)  # (row, rank of the choice), by expert
    num_rows = choice.expert_ids.flatten().bincount(minlength=moe.num_experts).tolist()
    weights = choice.weights.flatten()
    out = torch.zeros_like(x)
    for expert_id, mine in enumerate(torch.split(places, num_rows)):
        index = expert_id - experts.first_expert
        if len(mine) == 0 or not 0 <= index < experts.num_experts:
            continue
        rows = mine // num_chosen
        gate_up, down = experts.mlps[index] if isinstance(experts, SeparateExperts) else _mlp(experts, index)
        mine_weights = weights[mine, None]
        read = x[rows] * mine_weights if moe.scales_inputs else x[rows]
        result = apply(activate(apply(read, gate_up), moe), down)
        out.index_add_(0, rows, result if moe.scales_inputs else result * mine_weights)
    return out


def separated(experts: StackedExperts[Tensor], prepare: PrepareLinear | None = None) -> Experts[Tensor]:
    """Views of what is stacked. Quantized experts stay as they are, unless `prepare` takes each of their layers."""
    mlps = []
    for index in range(experts.num_experts):
        gate_up, down = (_prepared(linear, prepare) for linear in _mlp(experts, index))
        if gate_up is None or down is None:
            return experts
        mlps.append((gate_up, down))
    return SeparateExperts(
        router=experts.router,
        num_experts=experts.num_experts,
        first_expert=experts.first_expert,
        choice_bias=experts.choice_bias,
        expert_scales=experts.expert_scales,
        mlps=tuple(mlps),
    )


def _prepared(linear: Linear[Tensor], prepare: PrepareLinear | None) -> Linear[Tensor] | None:
    if not isinstance(linear.weight, QuantizedWeight):
        return linear
    return None if prepare is None else prepare(linear)


def _mlp(experts: Experts[Tensor], index: int) -> tuple[Linear[Tensor], Linear[Tensor]]:
    assert isinstance(experts, StackedExperts)
    return _expert(experts.gate_up, index), _expert(experts.down, index)


def _expert(linear: Linear[Tensor], index: int) -> Linear[Tensor]:
    weight = linear.weight
    weight = expert_of(weight, index) if isinstance(weight, QuantizedWeight) else weight[index]
    return replace(linear, weight=weight, bias=None if linear.bias is None else linear.bias[index])


def activated(gate_up: Tensor, moe: Moe, pointwise: Pointwise = directly) -> Tensor:
    """[..., 2F] -> [..., F]; see `Moe.activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if moe.activation == "silu":
        return pointwise(F.silu, gate) * up
    if moe.activation == "gelu_tanh":
        return pointwise(partial(F.gelu, approximate="tanh"), gate) * up
    assert moe.limit is not None and moe.alpha is not None
    gate, up = gate.clamp(max=moe.limit), up.clamp(-moe.limit, moe.limit)
    return gate * pointwise(torch.sigmoid, gate * moe.alpha) * (up + 1)
