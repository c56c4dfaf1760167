"""Names, shapes and parts of tensors: what is a GEMM, what a rank holds, what an engine stores."""

import pytest

from dflash_trt.core.mapping import Mapping
from dflash_trt.core.weight_spec import WeightSpec, extra_heads, is_linear, rank_shard, row_sharded, segment_specs

EXPERTS = WeightSpec(shape=(8, 12, 6), sharding="rows", segments=(8, 4), num_experts=8)


@pytest.mark.parametrize(
    ("spec", "tp_size", "ep_size", "shape", "segments"),
    [
        (WeightSpec(shape=(8, 6)), 2, 1, (8, 6), ()),
        (row_sharded((8, 6)), 2, 1, (4, 6), (4,)),
        (row_sharded((8,)), 4, 2, (2,), (2,)),
        (row_sharded((16, 6), (8, 4, 4), (1, 4, 4)), 2, 1, (12, 6), (4, 4, 4)),
        (WeightSpec(shape=(8, 6), sharding="columns"), 2, 1, (8, 3), ()),
        (EXPERTS, 4, 1, (8, 3, 6), (2, 1)),
        (EXPERTS, 4, 2, (4, 6, 6), (4, 2)),
        (EXPERTS, 4, 4, (2, 12, 6), (8, 4)),
        (WeightSpec(shape=(8, 12, 6), sharding="columns", num_experts=8), 4, 2, (4, 12, 3), ()),
        (WeightSpec(shape=(8, 12), num_experts=8), 4, 2, (4, 12), ()),
    ],
)
def test_a_rank_holds_its_part_of_the_rows_columns_or_experts(
    spec: WeightSpec, tp_size: int, ep_size: int, shape: tuple[int, ...], segments: tuple[int, ...]
) -> None:
    shard = rank_shard(spec, Mapping(world_size=tp_size, tp_size=tp_size, ep_size=ep_size))
    assert (shard.shape, shard.segments) == (shape, segments)
    assert shard.num_experts == (shape[0] if spec.num_experts else 0)


def test_fused_parts_are_tensors_of_their_own() -> None:
    q, k = segment_specs(row_sharded((12, 6), (8, 4), (1, 2)))
    assert (q.shape, q.segments, q.units) == ((8, 6), (8,), (1,))
    assert (k.shape, k.segments, k.units) == ((4, 6), (4,), (2,))
    assert [part.shape for part in segment_specs(EXPERTS)] == [(8, 8, 6), (8, 4, 6)]


@pytest.mark.parametrize(
    ("name", "spec", "expected"),
    [
        ("target.layers.0.qkv", WeightSpec(shape=(8, 6)), True),
        ("target.layers.0.qkv_bias", WeightSpec(shape=(8, 6)), False),
        ("target.layers.0.norm", WeightSpec(shape=(8,)), False),
        ("target.embedding", WeightSpec(shape=(8, 6)), False),
        ("target.layers.0.mixer.conv", WeightSpec(shape=(8, 4)), False),
        ("target.layers.0.experts.down", EXPERTS, True),
        ("target.layers.0.experts.down", WeightSpec(shape=(8, 6), num_experts=8), False),
        ("target.layers.0.qkv", WeightSpec(shape=(8, 6), is_plain=True), False),
    ],
)
def test_matrices_of_gemms_are_linear_and_nothing_else_is(name: str, spec: WeightSpec, expected: bool) -> None:
    assert is_linear(spec, name) == expected


def test_token_ids_and_float32_tensors_keep_their_dtype_in_every_engine() -> None:
    assert WeightSpec(shape=(1,)).stored_dtype("bfloat16") == "bfloat16"
    assert WeightSpec(shape=(1,), is_float32=True).stored_dtype("bfloat16") == "float32"
    assert WeightSpec(shape=(1,), is_integer=True).stored_dtype("bfloat16") == "int64"


def test_heads_that_the_models_lack_are_copies_of_the_targets() -> None:
    linears = ["draft.lm_head", "target.lm_head", "target.layers.0.qkv"]
    head = WeightSpec(shape=(8, 6))
    assert extra_heads({}, linears) == ("target.lm_head", "draft.lm_head")
    assert extra_heads({"target.lm_head": head}, linears) == ("draft.lm_head",)
    assert extra_heads({}, linears[2:]) == ()
