"""Targets with experts and sinks over the GPU kernels, against the step over plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.factories import Family, make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import (
    LOGPROB_TOLERANCE,
    NUM_DRAFT_TOKENS,
    assert_same,
    make_executors,
    next_batch,
    prefill,
    start,
)

OPTIONS: dict[Family, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "glm4_moe": {"n_group": 2, "topk_group": 1},  # half of a head is rotated
    "minimax_m2": {},
}
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_pair(root: Path, family: Family) -> tuple[Path, Path]:
    target = make_target(root / "target", family=family, num_hidden_layers=2, **FEW_HEADS, **OPTIONS[family])
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        attention_bias=family == "gpt_oss",
        **FEW_HEADS,
    )
    return target, drafter


@pytest.mark.parametrize(
    ("family", "weight_format"), [*((family, None) for family in OPTIONS), ("qwen3_moe", "int8"), ("gpt_oss", "int8")]
)
def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, family: Family, weight_format: str | None
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, family), device, weight_format=weight_format)
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=(2, 1).__getitem__)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    late = prefill("late", 3, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_changed_expert_or_sink_is_noticed(tmp_path: Path, device: torch.device, family: Family) -> None:
    """The negative control of the test above; without the change the step is as plain PyTorch gives it."""
    reference, executor = make_executors(make_pair(tmp_path, family), device)
    layer = executor.network.target_weights.layers[1]
    sinks = layer.mixer.sinks
    batch = StepBatch(requests=(prefill("greedy", 3, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)[0].logprobs[0]
    for perturbed in [layer.feed_forward.experts.down.codes] + ([] if sinks is None else [sinks]):
        original = perturbed.clone()
        perturbed.add_(0.1)
        assert abs(run_batch(executor, batch)[0].logprobs[0] - expected) > 10 * LOGPROB_TOLERANCE
        perturbed.copy_(original)
    found = run_batch(executor, batch)[0]
    assert found.logprobs[0] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
