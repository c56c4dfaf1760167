"""Rows on their way to experts of other ranks and back, where ranks have requests of their own.

`ExpertExchange` is the one seam: whatever moves rows in another way implements it, and `SharedRows` chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dflash_trt.backends.torch.process_group import RankGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRouter:
    """A layer's router, whose decision for a row depends on its logits alone."""

    num_experts: int
    logits: Callable[[Tensor], Tensor]  # [N, H] -> [N, num_experts]
    expert_ids: Callable[[Tensor], Tensor]  # of logits, [N, chosen]


class Dispatched(NamedTuple):
    """Rows [M, H] for experts of this rank, and their router logits [M, E]."""

    rows: Tensor
    logits: Tensor


class ExpertExchange(Protocol):
    """One layer's exchange: `dispatch`, then `combine`."""

    def dispatch(self, x: Tensor, routed: Tensor | None, router: RowRouter) -> Dispatched:
        """Rows [N, H] of this rank -> those that this rank computes. The router reads `routed`, if given."""
        ...

    def combine(self, part: Tensor) -> Tensor:
        """This rank's part [M, H] of the results -> the sums over the ranks [N, H] of this rank's rows."""
        ...


class AllRows:
    """Implements ExpertExchange: each rank computes the rows of all."""

    def __init__(self, gather: Callable[[Tensor], Tensor], scatter: Callable[[Tensor], Tensor]) -> None:
        self._gather, self._scatter = gather, scatter

    def dispatch(self, x: Tensor, routed: Tensor | None, router: RowRouter) -> Dispatched:
        rows = self._gather(x)
        return Dispatched(rows, router.logits(rows if routed is None else self._gather(routed)))

    def combine(self, part: Tensor) -> Tensor:
        return self._scatter(part)


class RowsByCounts:
    """Implements ExpertExchange: a row goes to the ranks alone that have experts of it. The host reads the counts.

    Each of `ep_size` groups of adjacent ranks has as many experts. Sums are made in float32 and in the order of the
    ranks.
    """

    def __init__(self, ranks: RankGroup, ep_size: int) -> None:
        self._ranks, self._ep_size = ranks, ep_size

    def dispatch(self, x: Tensor, routed: Tensor | None, router: RowRouter) -> Dispatched:
        self._shape = x.shape
        if len(x):
            logits = router.logits(x if routed is None else routed)
            reached = self._reached(router.expert_ids(logits).long(), router.num_experts)
        else:
            logits, reached = x.new_empty(0, router.num_experts), x.new_empty(0, self._ranks.num_ranks).bool()
        once = [1] * self._ranks.num_ranks
        sent = reached.sum(0)
        received = self._ranks.all_to_all_by_counts(sent[:, None], once, once)[:, 0]
        self._sent, self._received = torch.stack((sent, received)).tolist()
        self._rows = reached.t().nonzero()[:, 1]  # by rank
        packed = torch.cat((x, logits), dim=1)
        found = self._ranks.all_to_all_by_counts(packed[self._rows], self._sent, self._received)
        rows, found_logits = torch.split(found, [x.shape[1], router.num_experts], dim=1)
        return Dispatched(rows.contiguous(), found_logits.contiguous())

    def combine(self, part: Tensor) -> Tensor:
        parts = self._ranks.all_to_all_by_counts(part, self._received, self._sent)
        sums = torch.zeros(self._shape, dtype=torch.float32, device=part.device)
        by_rank = zip(torch.split(self._rows, self._sent), torch.split(parts, self._sent), strict=True)
        for rows, of_rank in by_rank:
            sums.index_add_(0, rows, of_rank.float())
        return sums.to(part.dtype)

    def _reached(self, expert_ids: Tensor, num_experts: int) -> Tensor:
        """bool [N, ranks]."""
        groups = expert_ids // (num_experts // self._ep_size)
        reached = torch.zeros(len(groups), self._ep_size, dtype=torch.bool, device=groups.device)
        reached.scatter_(1, groups, True)
        return reached.repeat_interleave(self._ranks.num_ranks // self._ep_size, dim=1)
