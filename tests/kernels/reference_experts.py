"""Definitions of the kernels of `routing.py` and `experts.py` in plain PyTorch."""

import torch
from torch import Tensor

from dflash_trt.kernels.routing_launch import Router


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:  # ids int64, weights float32, [N, num_chosen] each
    """The choice of each row, best first; of equals the lowest id."""
    scores = logits.float()
    if router.kind == "softmax_top_k":
        scores = scores.softmax(dim=-1)
    if router.kind == "sigmoid_top_k":
        scores = scores.sigmoid()
    wanted = scores if router.choice_bias is None else scores + router.choice_bias
    wanted = wanted.nan_to_num(nan=-torch.inf)
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
