"""Qwen's hybrids over the GPU kernels, against the step over plain PyTorch: states advance by accepted tokens alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, chained, plan_of, request_results, run_batch
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, assert_same, make_executors, next_batch, prefill, start

SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TARGETS: dict[str, dict[str, Any]] = {
    "next": {"family": "qwen3_next", **SMALL},
    "3.5": {"family": "qwen3_5_text", **SMALL},
}


def make_pair(root: Path, **options: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", **options)
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return target, drafter


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS.keys())
def test_steps_over_the_kernels_give_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, options: dict[str, Any]
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, **options), device)
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    for num_candidates in ((2, 1), (0, 2)):
        batch = next_batch(batch, expected, num_candidates=num_candidates.__getitem__)
        expected = run_batch(reference, batch)
        assert_same(run_batch(executor, batch), expected)
    late = prefill("late", 5, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    for _ in range(2):  # steps that the host fills in with nothing but their layout
        batch = next_batch(batch, expected, num_candidates=lambda r: 2)
        expected = run_batch(reference, batch)
        assert_same(request_results(executor.submit(chained(plan_of(batch))).result()), expected)
