"""Definitions of the kernels of `routing.py` and `experts.py` in plain PyTorch."""

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_trt.backends.torch.moe import Choice, run_chosen_experts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.kernels.routing_launch import Router
from dflash_trt.network.ops import Linear, StackedExperts


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:  # ids int64, weights float32, [N, num_chosen] each
    """The choice of each row, best first; of equals the lowest id."""
    scores = logits.float()
    if router.kind == "softmax_top_k":
        scores = scores.softmax(dim=-1)
    if router.kind == "sigmoid_top_k":
        scores = scores.sigmoid()
    wanted = scores if router.choice_bias is None else scores + router.choice_bias
    wanted = wanted.nan_to_num(nan=-torch.inf)
    if router.num_groups > 1:
        grouped = wanted.unflatten(1, (router.num_groups, -1))
        sums = grouped.topk(2, dim=2).values.sum(2)
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, : router.num_chosen_groups]
        is_open = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, best, True)
        wanted = torch.where(is_open[..., None], grouped, -torch.inf).flatten(1)
    ids = wanted.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen]
    weights = scores.gather(1, ids)
    if router.kind == "top_k_softmax":
        weights = weights.softmax(dim=-1)
    else:
        if router.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights * router.factor
    return ids, weights.to(logits.dtype).float()


def sorted_entries(expert_ids: Tensor) -> Tensor:  # [N, num_chosen] -> [N * num_chosen]
    return expert_ids.flatten().argsort(stable=True)


def tiles(expert_ids: Tensor, *, num_experts: int, tokens: int) -> list[tuple[int, int, int]]:
    """(expert, first place, the place after the last) of every tile."""
    found, first = [], 0
    for expert, count in enumerate(expert_ids.flatten().bincount(minlength=num_experts).tolist()):
        found += [(expert, at, min(at + tokens, first + count)) for at in range(first, first + count, tokens)]
        first += count
    return found


def run_experts(
    x: Tensor,  # float32 [N, H]
    gate_up: Tensor,  # float32 [E, 2F, H], dequantized
    down: Tensor,  # float32 [E, H, F]
    ids: Tensor,
    weights: Tensor,
    *,
    activation: Callable[[Tensor], Tensor],
    scales_inputs: bool = False,
    biases: tuple[Tensor, Tensor] | None = None,
    quantize_input: Callable[[Tensor, int, int], Tensor] = lambda x, expert, segment: x,
    quantize_hidden: Callable[[Tensor, int], Tensor] = lambda x, expert: x,
) -> Tensor:
    """Row by row and choice by choice. The quantizers round and scale back, with the scales of an expert."""
    out = torch.zeros_like(x)
    for row, chosen in enumerate(ids.tolist()):
        for choice, e in enumerate(chosen):
            if e < 0:  # of another rank
                continue
            weight = weights[row, choice]
            read = x[row] * weight if scales_inputs else x[row]
            halves = [part @ quantize_input(read, e, s) for s, part in enumerate(gate_up[e].chunk(2))]
            both = torch.cat(halves) + (0 if biases is None else biases[0][e])
            result = down[e] @ quantize_hidden(activation(both), e) + (0 if biases is None else biases[1][e])
            out[row] += result if scales_inputs else weight * result
    return out


def run_int8_experts(
    x: Tensor,  # F [N, H]
    gate_up: Linear[Tensor],  # as `int8_experts` makes them
    down: Linear[Tensor],
    ids: Tensor,  # among the experts of all ranks
    weights: Tensor,
    moe: Moe,
    *,
    first_expert: int = 0,
) -> Tensor:
    """By the reference backend: exact sums, and codes of its own for each expert's rows."""
    assert isinstance(down.weight, Int8Weight)
    experts = StackedExperts(
        router=Linear(weight=torch.zeros(1)),
        num_experts=len(down.weight.codes),
        first_expert=first_expert,
        gate_up=gate_up,
        down=down,
    )
    return run_chosen_experts(x, experts, moe, Choice(ids, weights.to(x.dtype)))


def int8_experts(codes: Tensor, row_scale: Tensor, bias: Tensor | None) -> Linear[Tensor]:
    """int8 [E, out, in] and float32 [E, out]."""
    return Linear(weight=Int8Weight(segments=(codes.shape[1],), codes=codes, weight_scale=row_scale), bias=bias)
