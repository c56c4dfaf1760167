"""How ranks with requests of their own exchange rows for experts: all of them, or each where its experts are.

A pure rule by costs, from sizes that every rank knows, so that all ranks choose alike and a plan chooses as the engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from dflash_trt.core.model.feed_forward import Moe


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeCosts:
    """Seconds of collectives of few bytes, and bytes per second that a rank receives in large ones."""

    gather_s: float
    sum_s: float
    send_s: float  # all_to_all
    host_s: float  # the host reads the counts, and sorts rows by rank
    bytes_per_s: float
    has_graphs: bool  # steps of verify blocks run in graphs, which need exchanges of fixed sizes


# Of NCCL between 8 GPUs of a node: NVIDIA's tables (aiconfigurator-core); `host_s` is assumed, no GPU has measured it.
_NVLINK_4: Final = ExchangeCosts(
    gather_s=12e-6, sum_s=12e-6, send_s=10e-6, host_s=60e-6, bytes_per_s=310e9, has_graphs=True
)
_NVLINK_5: Final = ExchangeCosts(
    gather_s=17e-6, sum_s=17e-6, send_s=12e-6, host_s=60e-6, bytes_per_s=610e9, has_graphs=True
)
# Of gloo between two processes of one machine with two cores; scripts/rank_waits.py measures it anew.
_GLOO: Final = ExchangeCosts(
    gather_s=0.6e-3, sum_s=0.9e-3, send_s=0.35e-3, host_s=0.15e-3, bytes_per_s=300e6, has_graphs=False
)
_BLACKWELL: Final = (10, 0)


def exchange_costs(capability: tuple[int, int] | None) -> ExchangeCosts:
    """Costs between GPUs of a compute capability, or between CPUs without one."""
    if capability is None:
        return _GLOO
    return _NVLINK_4 if capability < _BLACKWELL else _NVLINK_5


@cache
def reached_fraction(moe: Moe, ep_size: int) -> float:
    """Expected part of the ranks that have an expert of a row, of experts that are chosen evenly and independently.

    A choice among groups of experts reaches fewer.
    """
    others = moe.num_experts - moe.num_experts // ep_size
    chosen = moe.num_experts_per_token
    return 1 - math.comb(others, chosen) / math.comb(moe.num_experts, chosen)


def all_rows_s(costs: ExchangeCosts, row_bytes: int, num_rows: Sequence[int], *, num_inputs: int = 1) -> float:
    """Seconds in which every rank gets the rows of all, padded to those of the fullest, and sums of its own.

    Sums over ranks with different numbers of rows are an all-reduce. `num_inputs` tensors are gathered.
    """
    num_ranks, most, total = len(num_rows), max(num_rows), sum(num_rows)
    summed = (num_ranks - 1) * most if most * num_ranks == total else 2 * (num_ranks - 1) * total / num_ranks
    received = num_inputs * (num_ranks - 1) * most + summed
    return num_inputs * costs.gather_s + costs.sum_s + received * row_bytes / costs.bytes_per_s


def by_counts_s(
    costs: ExchangeCosts, row_bytes: int, num_rows: Sequence[int], *, fraction: float, logits_bytes: int
) -> float:
    """Seconds in which ranks exchange counts, rows with their router logits, and parts of sums.

    The fullest rank takes longest: it sends most rows, and receives most parts.
    """
    moved = fraction * (len(num_rows) - 1) * max(num_rows)
    return costs.host_s + 3 * costs.send_s + moved * (2 * row_bytes + logits_bytes) / costs.bytes_per_s


def sends_by_counts(
    moe: Moe, costs: ExchangeCosts, *, hidden_size: int, itemsize: int, ep_size: int, num_rows: Sequence[int]
) -> bool:
    """Whether a row goes to the ranks alone that have experts of it, `num_rows` being those of each rank.

    An MLP for every token, divided among all ranks, needs all rows anyway, unless it reads another norm of them.
    """
    if ep_size == 1 or (moe.shared is not None and not moe.has_own_norms):
        return False
    row_bytes, fraction = hidden_size * itemsize, reached_fraction(moe, ep_size)
    whole_s = all_rows_s(costs, row_bytes, num_rows, num_inputs=1 + moe.has_own_norms)
    logits_bytes = moe.num_experts * itemsize
    return by_counts_s(costs, row_bytes, num_rows, fraction=fraction, logits_bytes=logits_bytes) < whole_s
