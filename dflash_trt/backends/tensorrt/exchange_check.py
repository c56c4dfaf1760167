"""Checks an engine's collectives while it is opened: does a rank's K/V depend on the other ranks?

A collective that silently does nothing leaves a rank with its own partial sums, and all ranks still agree on the logits
that they gather. So each rank in turn runs the same tokens twice, while the other ranks run the same and then others:
its K/V of every layer after the first, or a recurrent layer's stored inputs, must change. The correct sums are not
known here.

Ranks with requests of their own contribute to each other's rows whatever they run, so they all run the same tokens, and
must write the same. A rank that gets nothing has zeros for most tokens, and a part of each layer's sums.
"""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.tensorrt.canary import PagedExecutor
from dflash_trt.backends.torch.process_group import RankGroup
from dflash_trt.core.batch import run_batch
from dflash_trt.core.errors import EngineDirError

# Of norms. Interpreted engines in float32 differ by 0 where sums are exchanged and by 1 where nothing is; ranks of a
# GPU may round differently, and route a token to another expert for it.
_MAX_DIFFERENCE: Final = 0.3
_TOKENS, _OTHER_TOKENS = (1, 2, 1), (2, 1, 2)


def check_exchange(executor: PagedExecutor, *, rank: int, num_ranks: int) -> None:
    """Run the check on all ranks at once, on idle executors, and zero their pages.

    Raises:
        EngineDirError: a state that no other rank contributes to.
    """
    alike, unchanged = _written(executor, _TOKENS), list[str]()
    for alone in range(num_ranks):
        found = _written(executor, _TOKENS if rank == alone else _OTHER_TOKENS)
        if rank == alone:
            unchanged = [name for name in list(alike)[1:] if bool((alike[name] == found[name]).all())]
    executor.state.fill(0.0)
    if unchanged:
        raise EngineDirError.about(
            f"collectives of rank {rank}",
            expected=f"K/V of {unchanged[0]} that depend on all {num_ranks} ranks",
            found="K/V of this rank alone: the engine's collectives do nothing",
            hint="Build the engine again with --collectives plugin, and report it with this message.",
        )


def check_shared_rows(executor: PagedExecutor, ranks: RankGroup) -> None:
    """Run the check on all ranks at once, on idle executors, and zero their pages.

    Raises:
        EngineDirError: a state that differs between ranks, on each of them.
    """
    unlike = []
    for name, own in _written(executor, _TOKENS).items():
        by_rank = ranks.all_gather_columns(own.reshape(-1, 1))
        first = by_rank[:, :1]
        differs = (by_rank - first).norm(dim=0) > _MAX_DIFFERENCE * first.norm()
        unlike += [f"{name} of rank {rank}" for rank in differs.nonzero().flatten().tolist()]
    executor.state.fill(0.0)
    if unlike:
        raise EngineDirError.about(
            "collectives of ranks with requests of their own",
            expected=f"{unlike[0]} as on rank 0, after the same tokens",
            found="something else: the engine's collectives do nothing",
            hint="Build the engine again with --collectives plugin, and report it with this message.",
        )


def _written(executor: PagedExecutor, token_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """The first page of each layer's K/V after these tokens, or its window in the first slot; float32."""
    limits = executor.limits
    executor.state.fill(0.0)
    tokens = token_ids[: min(limits.page_size, limits.max_num_tokens, limits.max_seq_len)]
    options = {"page_size": limits.page_size, "num_draft_tokens": limits.max_draft_len}
    run_batch(executor, sequence_batch(tokens, page_windows=limits.page_windows, **options))
    state = executor.state
    return {
        name: tensor[0].to(torch.float32, copy=True)
        for name, tensor in state.contents.items()
        if name in state.pages or name.endswith(".window")
    }
