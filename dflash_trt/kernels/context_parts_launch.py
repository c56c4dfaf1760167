"""Launching the kernels of decode context parallelism."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.kernels.attention_launch import REDUCTION_ROWS, REDUCTION_STAGES, join_splits
from dflash_trt.kernels.attention_plan import Partition, RequestTensors
from dflash_trt.kernels.context_parts import join_parts_kernel, own_rows_kernel, part_rows_kernel
from dflash_trt.kernels.launch_rules import ANY_ROWS
from dflash_trt.kernels.launching import FLOATS, check, check_tensor, next_power_of_2, request_capacity

_PAGES = 128  # entries of a page table that are copied at once


@dataclass(frozen=True, slots=True)
class ContextPart:
    """This rank's part of all positions: every `num_ranks`-th from `rank` on.

    `num_ranks` is a power of two, as it divides a page size that is one.
    """

    rank: int
    num_ranks: int

    @property
    def shift(self) -> int:
        return self.num_ranks.bit_length() - 1


WHOLE_CONTEXT = ContextPart(0, 1)


def own_rows(
    requests: RequestTensors,
    positions: Tensor,  # int32 [N]
    part: ContextPart,
    *,
    rows: slice,  # n of N
    min_direct_rows: int | None = None,
) -> RequestTensors:
    """Each of n rows as a request, over the positions of this rank.

    Rows of prompts that begin in this step and have `min_direct_rows` rows see nothing.
    """
    num_rows, (num_requests, num_pages) = rows.stop - rows.start, requests.page_table.shape
    check_tensor("positions", positions, dtype=torch.int32, shape=[None])
    requests.check(num_requests, "token_offsets", "context_lens", "page_table")
    found = RequestTensors(
        token_offsets=positions.new_empty(num_rows + 1),
        context_lens=positions.new_empty(num_rows),
        page_table=positions.new_empty(num_rows, num_pages),
    )
    own_rows_kernel[(num_rows,)](
        positions,
        requests.token_offsets,
        requests.context_lens,
        requests.page_table,
        found.token_offsets,
        found.context_lens,
        found.page_table,
        part.rank,
        part.shift,
        rows.start,
        ANY_ROWS if min_direct_rows is None else min_direct_rows,
        num_requests,
        num_pages,
        REQUESTS=request_capacity(num_requests),
        PAGES=_PAGES,
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return found


@dataclass(frozen=True, slots=True)
class PartRows:
    """What `attend_latents` leaves: the requests, and attended, log_sums, partials, stats and plan of its kernel."""

    requests: RequestTensors
    attended: Tensor
    log_sums: Tensor
    partials: Tensor
    stats: Tensor
    plan: Tensor
    partition: Partition
    heads: tuple[int, int]  # groups, heads of each

    def join(self) -> None:
        """Finish `attended`."""
        join_splits(self.attended, (self.partials, self.stats), self.plan, self.requests, self.partition, self.heads)

    def by_rank(self, num_ranks: int) -> Tensor:
        """F [ranks, N, heads / ranks, latent_dim + 4 bytes]: a row's last word is its logarithm."""
        num_rows, num_heads, latent_dim = self.attended.shape
        rank_heads = num_heads // num_ranks
        width = latent_dim + self.log_sums.itemsize // self.attended.itemsize
        is_whole, hint = latent_dim * self.attended.itemsize % 4 == 0, "Open the engine in float32."
        check(is_whole, "latent_dim", expected="rows of whole words", found=latent_dim, hint=hint)
        sent = self.attended.new_empty(num_ranks, num_rows, rank_heads, width)
        (groups, group_heads), tile = self.heads, self.partition.tile
        part_rows_kernel[(groups, self.partition.tile_capacity, tile // REDUCTION_ROWS)](
            self.attended,
            self.log_sums,
            self.partials,
            self.stats,
            self.plan,
            sent,
            sent.view(torch.float32),
            num_rows,
            groups,
            group_heads,
            rank_heads,
            HEAD_DIM=latent_dim,
            DIM=next_power_of_2(latent_dim),
            TILE=tile,
            ROWS=REDUCTION_ROWS,
            STAGES=REDUCTION_STAGES,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )
        return sent


def join_parts(
    parts: Tensor,  # F [ranks, N, heads, latent_dim + 4 bytes], see `PartRows.by_rank`
    token_offsets: Tensor,  # int32 [R + 1]
    attended: Tensor,  # out, F [N, heads, latent_dim]; zeros for rows of no request
) -> None:
    """The sums over all ranks' positions."""
    num_ranks, num_rows, num_heads, width = parts.shape
    latent_dim = width - 4 // parts.itemsize
    check_tensor("parts", parts, dtype=FLOATS, shape=[num_ranks, num_rows, num_heads, width])
    check_tensor("token_offsets", token_offsets, dtype=torch.int32, shape=[None])
    check_tensor("attended", attended, dtype=parts.dtype, shape=[num_rows, num_heads, latent_dim])
    join_parts_kernel[(num_rows, num_heads)](
        parts,
        parts.view(torch.float32),
        attended,
        token_offsets,
        num_rows,
        num_heads,
        len(token_offsets) - 1,
        RANKS=num_ranks,
        HEAD_DIM=latent_dim,
        DIM=next_power_of_2(latent_dim),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
