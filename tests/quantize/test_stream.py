"""The tensors of an engine's files: what a rank holds is its shard of the whole, whatever is quantized or copied."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.pair import CheckpointPair, open_pair
from dflash_trt.checkpoint.sharding import shard
from dflash_trt.core.mapping import Mapping
from dflash_trt.core.quantization import Calibration, QuantizationConfig
from dflash_trt.core.weight_spec import rank_shard
from dflash_trt.formats.registry import dequantize, split_quantized
from dflash_trt.quantize.plan import QuantizationPlan, make_plan
from dflash_trt.quantize.stream import engine_stream, whole_weights
from tests.factories import make_target, make_zlab_drafter

Tensors = dict[str, torch.Tensor]


def plain_tensors(pair: CheckpointPair, plan: QuantizationPlan, mapping: Mapping) -> Tensors:
    """A rank's tensors, quantized ones dequantized."""
    read = pair.iter_weights(dtype=torch.float32, mapping=mapping, whole_names=whole_weights(plan))
    calibration = Calibration(input_amax={linear.name: 4.0 for linear in plan.linears})
    tensors = dict(engine_stream(read, plan, calibration, dtype=torch.float32, mapping=mapping))
    table = {name: rank_shard(spec, mapping) for name, spec in plan.table().items()}
    plain, quantized = split_quantized(tensors, table, plan.formats)
    return plain | {name: dequantize(weight) for name, weight in quantized.items()}


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "choices", [{}, {"draft_lm_head": "fp8"}, {"lm_head": "fp8"}, {"target": "fp8", "draft_lm_head": "nvfp4_w4a16"}]
)
def test_ranks_hold_their_shards_of_the_whole(tmp_path: Path, choices: dict[str, Any], is_tied: bool) -> None:
    target = make_target(tmp_path / "target", tie_word_embeddings=is_tied)
    pair = open_pair(target, make_zlab_drafter(tmp_path / "drafter", target_dir=target))
    plan = make_plan(QuantizationConfig(**choices), pair.target, pair.draft, pair.quantization)
    whole = plain_tensors(pair, plan, Mapping())
    assert whole.keys() == plan.table().keys()
    for rank in range(2):
        mapping = Mapping(world_size=2, tp_size=2, rank=rank)
        found = plain_tensors(pair, plan, mapping)
        assert found.keys() == whole.keys()
        for name, spec in plan.table().items():
            assert torch.equal(found[name], shard(whole[name], spec, mapping)), name
