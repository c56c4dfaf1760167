"""Tensor parallelism cuts what it says, and nothing is lost or doubled."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.sharding import mapping_problems, shard
from dflash_trt.core.errors import ConfigError
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, rank_shard
from tests.checkpoint.joining import join, ranks
from tests.factories import make_target


@st.composite
def cut_weights(draw: st.DrawFn) -> tuple[WeightSpec, int]:
    """A spec and a tp_size that divides it, or that its units divide."""
    tp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    multiple = st.integers(1, 4).map(lambda n: n * tp_size)
    sharding = draw(st.sampled_from(["replicated", "rows", "columns"]))
    if sharding == "columns":
        return WeightSpec(shape=(draw(st.integers(1, 6)), draw(multiple)), sharding="columns"), tp_size
    units = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=6)))
    divisors = st.sampled_from([n for n in range(1, tp_size) if tp_size % n == 0] or [1])
    segments = tuple(unit * draw(multiple | divisors if unit > 1 else multiple) for unit in units)
    tail = tuple(draw(st.lists(st.integers(1, 3), max_size=1)))
    shape = (sum(segments), *tail)
    if sharding == "replicated":
        return WeightSpec(shape=shape), tp_size
    return WeightSpec(shape=shape, sharding="rows", segments=segments, units=units), tp_size


@settings(max_examples=200, deadline=None)
@given(cut_weights())
def test_joining_the_shards_of_all_ranks_gives_the_tensor_back(case: tuple[WeightSpec, int]) -> None:
    spec, tp_size = case
    tensor = torch.arange(torch.Size(spec.shape).numel()).reshape(spec.shape)
    shards = [shard(tensor, spec, mapping) for mapping in ranks(tp_size)]
    assert {tuple(piece.shape) for piece in shards} == {rank_shard(spec, mapping).shape for mapping in ranks(tp_size)}
    assert torch.equal(join(shards, spec), tensor)


def test_every_rank_gets_its_share_of_each_fused_segment() -> None:
    spec = WeightSpec(shape=(8,), sharding="rows", segments=(4, 2, 2))
    qkv = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])
    shards = [shard(qkv, spec, mapping).tolist() for mapping in ranks(2)]
    assert shards == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_neighbouring_ranks_hold_the_same_kv_head_where_heads_are_few() -> None:
    spec = WeightSpec(shape=(12,), sharding="rows", segments=(4, 4, 4), units=(1, 2, 4))
    qkv = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23])
    shards = [shard(qkv, spec, mapping).tolist() for mapping in ranks(4)]
    values = [20, 21, 22, 23]
    assert shards == [[0, 10, 11, *values], [1, 10, 11, *values], [2, 12, 13, *values], [3, 12, 13, *values]]


@pytest.mark.parametrize(
    ("tp_size", "names"),
    [
        (2, []),
        (4, []),
        (8, ["divisor of target num_heads 4"]),
        (
            3,
            [
                "divisor of target num_heads 4",
                "divisor or a multiple of target num_kv_heads 2",
                "divisor of target vocab_size 272",
                "divisor of drafter intermediate_size 80",
            ],
        ),
    ],
)
def test_a_tp_size_that_would_cut_a_head_is_refused(checkpoints: Path, tp_size: int, names: list[str]) -> None:
    pair = open_pair(checkpoints / "qwen3", checkpoints / "zlab")
    mapping = Mapping(world_size=tp_size, tp_size=tp_size)
    problems = mapping_problems(pair.target, pair.draft, mapping)
    assert bool(problems) == bool(names)
    for name in names:
        assert any(f"expected a {name}, found {tp_size}" in line for line in problems)
    if names:
        with pytest.raises(ConfigError, match="mapping tp_size"):
            pair.iter_weights(dtype=torch.float32, mapping=mapping)


def test_key_heads_of_a_gated_delta_net_are_not_cut(tmp_path: Path) -> None:
    """Four query heads, vocabulary and MLP would allow four ranks."""
    target = make_target(tmp_path, family="qwen3_5_text", linear_num_key_heads=2, linear_num_value_heads=4)
    spec = open_pair(target, None).target
    [problem] = mapping_problems(spec, None, Mapping(world_size=4, tp_size=4))
    assert "expected a divisor of target num_key_heads 2, found 4" in problem
    assert mapping_problems(spec, None, Mapping(world_size=2, tp_size=2)) == []


def test_a_reduced_draft_vocabulary_must_be_divisible_too(checkpoints: Path) -> None:
    pair = open_pair(checkpoints / "qwen3", checkpoints / "speculators")
    assert pair.draft is not None
    odd = pair.draft.model_copy(update={"draft_vocab_size": 63})
    mapping = Mapping(world_size=2, tp_size=2)
    assert mapping_problems(pair.target, pair.draft, mapping) == []
    assert any("drafter draft_vocab_size 63" in line for line in mapping_problems(pair.target, odd, mapping))


def test_pipeline_parallelism_is_refused(checkpoints: Path) -> None:
    pair = open_pair(checkpoints / "qwen3", None)
    with pytest.raises(ConfigError, match="mapping pp_size: expected 1, found 2"):
        pair.iter_weights(dtype=torch.float32, mapping=Mapping(world_size=2, pp_size=2))
