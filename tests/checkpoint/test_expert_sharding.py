"""Experts over ranks: by expert, by rows and columns, and both; blocks of a format stay whole."""

import itertools
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.checkpoint.sharding import mapping_problems
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.model.decoder import TargetSpec
from tests.checkpoint.expert_files import to_mxfp4
from tests.checkpoint.refusals import weights_of
from tests.factories import make_target


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories by the name of their experts; not to be changed."""
    root = tmp_path_factory.mktemp("experts")
    make_target(root / "qwen3_moe", family="qwen3_moe", tokenizer=False, num_hidden_layers=2)
    make_target(root / "gpt_oss", family="gpt_oss", tokenizer=False, num_hidden_layers=2)
    to_mxfp4(make_target(root / "mxfp4", family="gpt_oss", tokenizer=False, num_hidden_layers=2))
    make_target(root / "qwen3", family="qwen3", tokenizer=False, num_hidden_layers=2)
    return root


@pytest.mark.parametrize(
    ("source", "tp_size", "ep_size"),
    [
        *itertools.product(("gpt_oss", "qwen3_moe"), (4,), (1, 2, 4)),
        *itertools.product(("mxfp4",), (2,), (1, 2)),  # 64 features are two blocks of 32
    ],
)
def test_ranks_hold_parts_of_the_experts_that_make_the_whole(
    targets: Path, source: str, tp_size: int, ep_size: int
) -> None:
    """Rank by rank: groups of experts one after the other, and within a group rows or columns."""
    pair = open_pair(targets / source, None)
    mapping = Mapping(world_size=tp_size, tp_size=tp_size, ep_size=ep_size)
    whole = weights_of(pair)
    ranks = [dict(pair.iter_weights(dtype=torch.float32, mapping=mapping.of_rank(rank))) for rank in range(tp_size)]
    moe_tp_size = tp_size // ep_size
    for name in [name for name in whole if ".experts." in name]:
        groups = []
        for group in range(ep_size):
            pieces = [rank[name] for rank in ranks[group * moe_tp_size : (group + 1) * moe_tp_size]]
            if "down_bias" in name:
                groups.append(pieces[0])
            elif "down" in name:
                groups.append(torch.cat(pieces, dim=2))
            else:
                halves = [piece.chunk(2, dim=1) for piece in pieces]
                groups.append(torch.cat([half[i] for i in range(2) for half in halves], dim=1))
        assert torch.equal(torch.cat(groups), whole[name]), name
        assert all(torch.equal(rank["target.layers.1.router"], whole["target.layers.1.router"]) for rank in ranks)


def test_sizes_that_ranks_cannot_divide_are_refused_with_what_they_can(targets: Path) -> None:
    pair = open_pair(targets / "gpt_oss", None)

    def refusal(tp_size: int, ep_size: int, spec: TargetSpec = pair.target) -> str:
        mapping = Mapping(world_size=tp_size, tp_size=tp_size, ep_size=ep_size)
        return "\n".join(mapping_problems(spec, None, mapping))

    assert refusal(2, 2) == ""
    assert all("num_experts" not in refusal(*sizes) for sizes in ((16, 1), (12, 4)))  # 8 of them, by ep_size alone
    assert "mapping ep_size: expected a divisor of num_experts 8, found 3" in refusal(3, 3)
    assert "tp_size / ep_size to divide an expert's intermediate_size 64, found 3 / 1" in refusal(3, 1)
    dense = open_pair(targets / "qwen3", None).target
    assert "mapping ep_size: expected 1, for no layer has experts, found 2" in refusal(2, 2, dense)


def test_ranks_with_requests_of_their_own_divide_the_mlp_beside_the_experts(targets: Path) -> None:
    target = open_pair(targets / "qwen3_moe", None).target

    def refusals(**fields: object) -> list[str]:
        moe = target.moes[0].model_copy(update=fields)
        layers = tuple(layer.model_copy(update={"feed_forward": moe}) for layer in target.layers)
        spec = target.model_copy(update={"layers": layers})
        return mapping_problems(spec, None, Mapping(world_size=4, dp_size=4, ep_size=4))

    assert refusals() == refusals(shared_size=48) == []
    [refusal] = refusals(shared_size=50)
    assert refusal.startswith("mapping tp_size: expected a divisor of target shared_size 50, found 4")
    assert refusals(shared_size=50, has_own_norms=True) == [refusal], "its ranks divide it, too"
