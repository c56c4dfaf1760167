"""Decode context parallelism: latents of which each rank keeps some positions, and attention of all heads over them.

Position p is on rank p % ranks: any context is divided evenly, and a rank's positions, renumbered, are a sequence. A
rank gathers the queries of all heads, attends over its own latents, and sends each rank the sums of that one's heads
with the logarithms of their divisors, by which they are joined, as the splits of flash-decoding are
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.attention_plan import AttentionPlan, QueryGroup
from dflash_trt.backends.torch.fixed_shapes import KEY_TILE, directly, in_vectors, padded_length
from dflash_trt.backends.torch.process_group import RankGroup


def own_places(positions: Tensor, ranks: RankGroup) -> Tensor:
    """Of each position, the last place of this rank at or before it; -1 if there is none."""
    return torch.div(positions - ranks.rank, ranks.num_ranks, rounding_mode="floor")


def gathered_heads(queries: Tensor, ranks: RankGroup) -> Tensor:
    """[N, heads, C] of this rank -> [N, ranks * heads, C]."""
    return ranks.all_gather_columns(queries.flatten(1)).view(len(queries), -1, queries.shape[2])


def exchanged_parts(
    attended: Tensor,  # [N, ranks * heads, C]: of all heads, over this rank's positions
    log_sums: Tensor,  # float32 [N, ranks * heads]
    ranks: RankGroup,
) -> tuple[Tensor, Tensor]:  # [ranks, N, heads, C] and float32 [ranks, N, heads], views of one tensor
    """Of this rank's heads, over each rank's positions. A logarithm travels behind its row, bit by bit."""
    num_rows, _, num_columns = attended.shape
    by_rank = (num_rows, ranks.num_ranks, -1)
    width = num_columns + log_sums.itemsize // attended.itemsize
    sent = attended.new_empty(ranks.num_ranks, num_rows, attended.shape[1] // ranks.num_ranks, width)
    sent[..., :num_columns] = attended.view(*by_rank, num_columns).transpose(0, 1)
    sent.view(log_sums.dtype)[..., -1] = log_sums.view(by_rank).transpose(0, 1)
    counts = [num_rows] * ranks.num_ranks
    received = ranks.all_to_all_by_counts(sent.view(-1, sent[0, 0].numel()), counts, counts).view(sent.shape)
    return received[..., :num_columns], received.view(log_sums.dtype)[..., -1]


def joined_parts(
    parts: Tensor,  # [ranks, N, heads, C]
    log_sums: Tensor,  # float32 [ranks, N, heads]; -inf where a rank has no position
    *,
    is_tiled: bool = False,  # see `fixed_shapes.py`
) -> Tensor:  # [N, heads, C]
    """The sums over all positions. The order of the ranks is that of the additions."""
    pointwise = in_vectors if is_tiled else directly
    weights = pointwise(torch.exp, log_sums - log_sums.amax(0))
    joined, total = parts[0].float() * weights[0, ..., None], weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        joined, total = joined + part.float() * weight[..., None], total + weight
    return (joined / total[..., None]).to(parts.dtype)


def own_groups(plan: AttentionPlan, ranks: RankGroup, *, page_size: int, is_tiled: bool) -> list[QueryGroup]:
    """Groups of the plan over this rank's positions; `page_size` is of the positions that a rank keeps of a page.

    A row at a position before all of them sees zeros, and must not be counted.
    """
    if plan.own_groups is None:
        plan.own_groups = [_own_group(group, ranks, page_size, is_tiled) for group in plan.groups]
    return plan.own_groups


def _own_group(group: QueryGroup, ranks: RankGroup, page_size: int, is_tiled: bool) -> QueryGroup:
    last_places = own_places(group.positions, ranks)
    num_own = last_places.amax(1) + 1
    num_keys = padded_length(max(int(num_own.max()), 1), KEY_TILE if is_tiled else 1)
    num_pages = -(-num_keys // page_size)
    places = torch.arange(num_pages * page_size)
    foreign = ((places >= num_own[:, None]) & (places < num_keys)).flatten().nonzero()[:, 0]
    return replace(
        group,
        positions=last_places.clamp(min=0),
        page_ids=F.pad(group.page_ids, (0, max(0, num_pages - group.page_ids.shape[1])))[:, :num_pages],
        num_keys=num_keys,
        foreign_rows=foreign if len(foreign) else None,
        first_keys=None,
        biases={},
        gathers={},
    )
