"""Where a rank stands: among those that divide a layer, and among those that divide experts."""

import pytest
from pydantic import ValidationError

from dflash_trt.core.mapping import Mapping


def test_each_rank_has_one_part_of_a_layer_and_one_of_the_experts() -> None:
    """Ranks of a group are adjacent: of 8 ranks in 4 groups, each group has 2."""
    alone = Mapping(world_size=8, tp_size=8, ep_size=4)
    ranks = [alone.of_rank(rank) for rank in range(8)]
    assert [rank.tp_rank for rank in ranks] == list(range(8))
    assert [rank.ep_rank for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rank.moe_tp_rank for rank in ranks] == [0, 1] * 4
    assert {rank.moe_tp_size for rank in ranks} == {2}
    assert ranks[0] == alone and ranks[5].rank == 5 and ranks[5].of_rank(0) == alone


def test_ranks_with_requests_of_their_own_divide_experts_alone() -> None:
    ranks = [Mapping(world_size=4, dp_size=4, ep_size=2, rank=rank) for rank in range(4)]
    assert {(rank.tp_size, rank.tp_rank, rank.num_kv_heads_of(8)) for rank in ranks} == {(1, 0, 8)}
    assert [(rank.ep_rank, rank.moe_tp_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    mixed = [Mapping(world_size=4, tp_size=2, dp_size=2, ep_size=4, rank=rank) for rank in range(4)]
    assert [(rank.tp_rank, rank.ep_rank) for rank in mixed] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_stages_of_a_pipeline_divide_their_layers_alike() -> None:
    ranks = [Mapping(world_size=4, tp_size=2, pp_size=2, ep_size=2, rank=rank) for rank in range(4)]
    assert [(rank.tp_rank, rank.ep_rank, rank.moe_tp_rank) for rank in ranks] == [(0, 0, 0), (1, 1, 0)] * 2


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "of_each"), [(1, 8, 8), (2, 8, 4), (8, 8, 1), (16, 8, 1), (4, 1, 1)]
)
def test_a_rank_has_its_part_of_the_kv_heads_or_a_copy_of_one(tp_size: int, num_kv_heads: int, of_each: int) -> None:
    assert Mapping(world_size=tp_size, tp_size=tp_size).num_kv_heads_of(num_kv_heads) == of_each


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 4, "tp_size": 2}, "world_size 4 is not tp_size 2 . pp_size 1 . dp_size 1"),
        ({"world_size": 4, "tp_size": 4, "ep_size": 3}, "ep_size 3 does not divide the 4 ranks of experts"),
        ({"world_size": 2, "tp_size": 2, "rank": 2}, "rank 2 is not in 0..1"),
        ({"world_size": 1025, "tp_size": 1025}, "less than or equal to 1024"),
    ],
)
def test_ranks_that_cannot_be_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Mapping(**fields)
