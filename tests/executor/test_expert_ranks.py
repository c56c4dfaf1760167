"""Two ranks that divide experts compute what one computes: by rows and columns, or by number, in packed formats."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.engine_dir import EngineDir
from tests.checkpoint.expert_files import to_mxfp4
from tests.executor.rank_engines import build, opened
from tests.factories import make_target, make_zlab_drafter
from tests.traces import GREEDY, PROMPTS, SAMPLED, integers, logprobs, trace

K = 3


@pytest.fixture(scope="module", params=["gpt_oss in MXFP4", "qwen3_moe in NVFP4"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A root with target and drafter, and the fields of their build."""
    root = tmp_path_factory.mktemp("pair")
    family, quantization = str(request.param).split(" in ")
    target = make_target(root / "target", family=family, vocab_size=12, tokenizer=False)
    fields: dict[str, Any] = {"quantization": "nvfp4_w4a16"}
    if quantization == "MXFP4":
        to_mxfp4(target)
        fields = {}
    make_zlab_drafter(root / "drafter", target_dir=target, attention_bias=True, intermediate_size=96)
    return root, fields


@pytest.fixture(scope="module")
def one(checkpoints: tuple[Path, Any]) -> Iterator[Any]:
    root, fields = checkpoints
    with opened(build(root, tp_size=1, **fields)) as executor:
        yield executor


@pytest.mark.parametrize("ep_size", [1, 2])
def test_every_step_of_a_trace_equals_that_of_one_rank(checkpoints: tuple[Path, Any], one: Any, ep_size: int) -> None:
    root, fields = checkpoints
    engine: EngineDir = build(root, tp_size=2, ep_size=ep_size, overwrite=True, **fields)
    with opened(engine) as two:
        for samplings in (GREEDY, SAMPLED):
            expected, _ = trace(one, samplings, num_draft_tokens=(K,))
            found, _ = trace(two, samplings, num_draft_tokens=(K,))
            assert integers(found) == integers(expected)
            torch.testing.assert_close(logprobs(found), logprobs(expected), rtol=0, atol=1e-4)
        local = two._local
        *layers, layer = local.network.target_weights.layers
        experts = layer.feed_forward.experts
        experts = replace(experts, first_expert=experts.first_expert + 4 // ep_size)
        layers.append(replace(layer, feed_forward=replace(layer.feed_forward, experts=experts)))
        expected_logits = one.target_logits(PROMPTS[1])
        torch.testing.assert_close(two.target_logits(PROMPTS[1]), expected_logits, rtol=0, atol=1e-4)
        local.network = replace(
            local.network, target_weights=replace(local.network.target_weights, layers=tuple(layers))
        )
        assert (two.target_logits(PROMPTS[1]) - expected_logits).abs().max() > 0.01  # a wrong part of the experts
