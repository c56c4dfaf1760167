"""Rows of a step that all ranks compute together, where ranks have requests of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.expert_exchange import AllRows, ExpertExchange, RowRouter, RowsByCounts
from dflash_trt.backends.torch.process_group import RankGroup, summed_in_order
from dflash_trt.core.expert_exchange import ExchangeCosts, sends_by_counts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.step_plan import JointRows
from dflash_trt.network.ops import ExchangedRows
from dflash_trt.network.ops_without_rows import OpsWithoutRows, share_step, without_mixers
from dflash_trt.network.state import StepState
from dflash_trt.network.step import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """The exchanges of a step of `joint` size, without which there are none."""

    ranks: RankGroup
    joint: JointRows | None
    is_in_order: bool = False  # sums do not depend on where a row stands
    ep_size: int = 1
    costs: ExchangeCosts | None = None  # by which rows go to experts; None: in exchanges of fixed sizes

    def all_gather(self, x: Tensor, exchanged: ExchangedRows) -> Tensor:
        """[N, H] or [N] of this rank -> [sum, H] or [sum], rank 0's first."""
        gathered = self.ranks.all_gather_rows(x if x.dim() == 2 else x[:, None], self._num_rows(exchanged))
        return gathered if x.dim() == 2 else gathered[:, 0]

    def reduce_scatter(self, x: Tensor, exchanged: ExchangedRows) -> Tensor:
        """Each rank's part [sum, H] of all rows -> the sum of this rank's rows [N, H]."""
        num_rows = self._num_rows(exchanged)
        if not self.is_in_order:
            return self.ranks.reduce_scatter_rows(x, num_rows)
        start = sum(num_rows[: self.ranks.rank])
        return summed_in_order(self.ranks, x, slice(start, start + num_rows[self.ranks.rank]))

    def run_experts(
        self,
        x: Tensor,
        routed: Tensor | None,
        moe: Moe,
        exchanged: ExchangedRows,
        router: RowRouter,
        run: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Rows [N, H] of this rank -> the sums [N, H] of their experts on all ranks.

        `run` gives this rank's part [M, H] for rows and their router logits; the router reads `routed`, if given.
        """
        exchange = self._expert_exchange(x, moe, exchanged)
        found = exchange.dispatch(x, routed, router)
        return exchange.combine(run(*found) if len(found.rows) else found.rows)

    def _expert_exchange(self, x: Tensor, moe: Moe, exchanged: ExchangedRows) -> ExpertExchange:
        sizes = {"hidden_size": x.shape[1], "itemsize": x.element_size(), "ep_size": self.ep_size}
        if self.costs is not None and sends_by_counts(moe, self.costs, num_rows=self._num_rows(exchanged), **sizes):
            return RowsByCounts(self.ranks, self.ep_size)
        return AllRows(partial(self.all_gather, exchanged=exchanged), partial(self.reduce_scatter, exchanged=exchanged))

    def own_rows(self, x: Tensor, exchanged: ExchangedRows) -> Tensor:
        """Each rank's columns [sum, C] of all rows -> all columns [N, ranks * C] of this rank's rows."""
        return self.ranks.all_to_all_rows(x, self._num_rows(exchanged))

    def part_of_embedding(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of the tokens that this rank's part of an embedding has, and zeros for the others."""
        local = token_ids - self.ranks.rank * len(table)
        is_other = (local < 0) | (local >= len(table))
        return F.embedding(local.masked_fill(is_other, 0), table).masked_fill_(is_other[:, None], 0)

    def _num_rows(self, exchanged: ExchangedRows) -> tuple[int, ...]:
        joint = self.joint
        assert joint is not None
        if exchanged.prompt_part is not None:
            return joint.of_prompt_part(exchanged.prompt_part)
        if exchanged.per_request:
            return tuple(exchanged.per_request * num_requests for num_requests in joint.num_requests)
        return joint.num_tokens


class IdleRank:
    """The part of a rank that has no rows in a step."""

    def __init__(self, network: Network[Tensor], state: StepState[Tensor], dtype: torch.dtype) -> None:
        self._network, self._state, self._dtype = without_mixers(network), state, dtype

    def run(self, ops: Any, joint: JointRows) -> None:
        """`ops` are those of any step."""
        share_step(
            OpsWithoutRows(ops, self._no_rows),
            self._network,
            self._state,
            num_draft_tokens=joint.num_draft_tokens,
            num_prompt_parts=joint.num_prompt_parts,
        )

    def _no_rows(self, features: int | None) -> Tensor:
        """See `OpsWithoutRows`."""
        device = self._network.target_weights.norm.device
        if features is None:
            return torch.empty(0, dtype=torch.int32, device=device)
        return torch.empty(0, features, dtype=self._dtype, device=device)
