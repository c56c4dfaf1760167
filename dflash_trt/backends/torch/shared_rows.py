"""Rows of a step that all ranks compute together: those of experts, where ranks have requests of their own."""

from dataclasses import dataclass

from torch import Tensor

from dflash_trt.backends.torch.process_group import RankGroup, summed_in_order


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedRows:
    """Rank r has `num_rows[r]` tokens in this step."""

    ranks: RankGroup
    num_rows: tuple[int, ...]
    is_in_order: bool = False  # sums do not depend on where a row stands

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, H] of this rank -> [sum, H], rank 0's first."""
        return self.ranks.all_gather_rows(x, self.num_rows)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Each rank's part [sum, H] of all rows -> the sum of this rank's rows [N, H]."""
        if not self.is_in_order:
            return self.ranks.reduce_scatter_rows(x, self.num_rows)
        start = sum(self.num_rows[: self.ranks.rank])
        return summed_in_order(self.ranks, x, slice(start, start + self.num_rows[self.ranks.rank]))
