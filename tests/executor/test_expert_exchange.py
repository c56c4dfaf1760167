"""Rows on their way to experts of other ranks: sums are those of one rank, whichever exchange the costs choose."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.expert_exchange import RowRouter, RowsByCounts
from dflash_trt.backends.torch.moe import chosen_experts, run_chosen_experts
from dflash_trt.backends.torch.process_group import ProcessRanks
from dflash_trt.backends.torch.shared_rows import SharedRows
from dflash_trt.core.expert_exchange import (
    ExchangeCosts,
    all_rows_s,
    by_counts_s,
    exchange_costs,
    reached_fraction,
    sends_by_counts,
)
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.step_plan import JointRows
from dflash_trt.network.ops import OF_TOKENS, Linear, StackedExperts

MOE = Moe(num_experts=8, num_experts_per_token=2, intermediate_size=8, routing="softmax_top_k")
H = 16
CHEAP_COUNTS = replace(exchange_costs(None), send_s=0.0, host_s=0.0)
CHEAP_GATHERS = replace(exchange_costs(None), host_s=1.0)
GPUS = exchange_costs((9, 0))


class RecordedRanks(ProcessRanks):
    """Says which exchanges of rows ran."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.ran: list[str] = []

    def all_gather_rows(self, x: Tensor, num_rows: Sequence[int]) -> Tensor:
        self.ran.append("gather")
        return super().all_gather_rows(x, num_rows)

    def all_to_all_by_counts(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.ran.append("counts" if x.shape[1] == 1 else f"{len(x)} rows")
        return super().all_to_all_by_counts(x, sent, received)


def experts_of(first: int, count: int) -> StackedExperts[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    router, gate_up, down = random(8, H), random(8, 16, H), random(8, H, 8)
    part = slice(first, first + count)
    return StackedExperts(
        router=Linear(name="router", weight=router),
        gate_up=Linear(name="gate_up", weight=gate_up[part]),
        down=Linear(name="down", weight=down[part]),
        num_experts=count,
        first_expert=first,
    )


def rows_of(rank: int, count: int) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(rank))


def run_rank(store: Path, rank: int, num_rows: tuple[int, ...], costs: ExchangeCosts) -> tuple[Tensor, list[str]]:
    num_ranks, cpu = len(num_rows), torch.device("cpu")
    ranks = RecordedRanks.join(store, rank=rank, num_ranks=num_ranks, device=cpu, timeout_s=60.0)
    assert isinstance(ranks, RecordedRanks)
    joint = JointRows(
        num_tokens=num_rows,
        num_requests=num_rows,
        num_prompt_rows=(0,) * num_ranks,
        num_draft_tokens=0,
        is_decode=False,
    )
    shared = SharedRows(ranks=ranks, joint=joint, is_in_order=True, ep_size=num_ranks, costs=costs)
    experts = experts_of(8 // num_ranks * rank, 8 // num_ranks)
    weight = experts.router.weight
    assert isinstance(weight, Tensor)
    router = RowRouter(
        num_experts=8,
        logits=lambda rows: rows @ weight.T,
        expert_ids=lambda logits: chosen_experts(logits, MOE).expert_ids,
    )

    def run(rows: Tensor, logits: Tensor) -> Tensor:
        return run_chosen_experts(rows, experts, MOE, chosen_experts(logits, MOE))

    found = shared.run_experts(rows_of(rank, num_rows[rank]), None, MOE, OF_TOKENS, router, run)
    ranks.smallest(0)  # all have read what they were sent
    ranks.close()
    return found, ranks.ran


@pytest.mark.parametrize("num_rows", [(5, 3), (7, 0), (4, 0, 1, 9)])
def test_sums_are_those_of_one_rank_and_the_costs_choose_the_exchange(
    tmp_path: Path, num_rows: tuple[int, ...]
) -> None:
    experts, by_costs = experts_of(0, 8), {}
    for name, costs in (("counts", CHEAP_COUNTS), ("gather", CHEAP_GATHERS)):
        with ThreadPoolExecutor(len(num_rows)) as pool:
            started = [pool.submit(run_rank, tmp_path / name, rank, num_rows, costs) for rank in range(len(num_rows))]
            by_costs[name] = [each.result() for each in started]
    assert isinstance(experts.router.weight, Tensor)
    for rank, count in enumerate(num_rows):
        x = rows_of(rank, count)
        choice = chosen_experts(x @ experts.router.weight.T, MOE)
        expected = run_chosen_experts(x, experts, MOE, choice)
        sent = (choice.expert_ids // (8 // len(num_rows))).tolist()
        (counted, ran), (gathered, gathers) = by_costs["counts"][rank], by_costs["gather"][rank]
        torch.testing.assert_close(counted, expected, rtol=0, atol=4e-5)  # measured: 1.6e-5
        torch.testing.assert_close(gathered, expected, rtol=0, atol=4e-5)
        assert gathers == ["gather"]
        assert ran[:2] == ["counts", f"{sum(len(set(ids)) for ids in sent)} rows"] and len(ran) == 3


def test_the_rule_takes_the_cheaper_exchange_by_costs() -> None:
    sizes = {"hidden_size": 2880, "itemsize": 2, "ep_size": 8}
    moe = Moe(num_experts=128, num_experts_per_token=4, intermediate_size=2880, routing="top_k_softmax")
    fraction = reached_fraction(moe, 8)
    assert 0.41 < fraction < 0.43
    for count in (1, 64, 256, 512, 1024, 4096):
        rows = [count] * 8
        whole_s = all_rows_s(GPUS, 5760, rows)
        counted_s = by_counts_s(GPUS, 5760, rows, fraction=fraction, logits_bytes=256)
        assert sends_by_counts(moe, GPUS, num_rows=rows, **sizes) == (counted_s < whole_s)
    assert not sends_by_counts(moe, GPUS, num_rows=[64] * 8, **sizes)
    assert sends_by_counts(moe, GPUS, num_rows=[1024] * 8, **sizes)
    slow = replace(GPUS, host_s=1e-3)
    assert not sends_by_counts(moe, slow, num_rows=[1024] * 8, **sizes)


@pytest.mark.parametrize(("count", "width"), [(3, 64), (64, 16)])
def test_a_step_chooses_as_the_rule_by_the_width_of_its_rows(count: int, width: int) -> None:
    x, none = torch.zeros(count, width), (0, 0)
    joint = JointRows(
        num_tokens=(count, 2), num_requests=none, num_prompt_rows=none, num_draft_tokens=0, is_decode=False
    )
    chosen = set()
    for host_s in (0.0, *(1e-3 * 1.5**n for n in range(40))):
        costs = replace(GPUS, bytes_per_s=1.0, host_s=host_s)
        shared = SharedRows(ranks=RecordedRanks.__new__(RecordedRanks), joint=joint, ep_size=2, costs=costs)
        sizes = {"hidden_size": width, "itemsize": 4, "ep_size": 2, "num_rows": (count, 2)}
        chosen.add(is_counted := isinstance(shared._expert_exchange(x, MOE, OF_TOKENS), RowsByCounts))
        assert is_counted == sends_by_counts(MOE, costs, **sizes)
    assert chosen == {False, True}


def test_an_mlp_for_every_token_needs_all_rows_unless_it_has_a_norm_of_its_own() -> None:
    sizes = {"hidden_size": 7168, "itemsize": 2, "ep_size": 8}
    fields = {"num_experts": 384, "num_experts_per_token": 8, "intermediate_size": 2048, "routing": "sigmoid_top_k"}
    rows = [8192] * 8
    assert sends_by_counts(Moe(**fields), GPUS, num_rows=rows, **sizes)
    assert not sends_by_counts(Moe(**fields, shared_size=2048), GPUS, num_rows=rows, **sizes)
    assert sends_by_counts(Moe(**fields, shared_size=2048, has_own_norms=True), GPUS, num_rows=rows, **sizes)
    assert not sends_by_counts(Moe(**fields), GPUS, num_rows=rows, **(sizes | {"ep_size": 1})), "on all ranks anyway"
