"""Gemma over the GPU kernels: two geometries of pages in one step, against the step over plain PyTorch."""

from pathlib import Path

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.factories import make_zlab_drafter
from tests.gemma_targets import Gemma, make_gemma
from tests.kernels.test_step_on_kernels import (
    LOGPROB_TOLERANCE,
    NUM_DRAFT_TOKENS,
    assert_same,
    make_executors,
    next_batch,
    prefill,
    start,
)

FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_pair(root: Path, family: Gemma) -> tuple[Path, Path]:
    layer_types = ["sliding_attention", "full_attention"]
    target = make_gemma(
        root / "target", family=family, num_hidden_layers=2, vocab_size=272, layer_types=layer_types, **FEW_HEADS
    )
    drafter = make_zlab_drafter(
        root / "drafter",
        target_dir=target,
        num_layers=1,
        target_layer_ids=(0,),
        block_size=NUM_DRAFT_TOKENS + 1,
        final_logit_softcapping=2.0,
        **FEW_HEADS,
    )
    return target, drafter


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, family: Gemma
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, family), device)
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    if family == "gemma3_text":  # the rest is the same, and steps on a CPU take long
        return
    batch = next_batch(batch, expected, num_candidates=(2, 1).__getitem__)
    late = prefill("late", 3, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


def test_a_changed_scale_of_a_layer_is_noticed(tmp_path: Path, device: torch.device) -> None:
    """The negative control of the test above."""
    reference, executor = make_executors(make_pair(tmp_path, "gemma4_text"), device)
    executor.network.target_weights.layers[0].output_scale.mul_(1.1)
    batch, expected = start(reference)
    found = run_batch(executor, batch)
    assert abs(found[0].logprobs[0] - expected[0].logprobs[0]) > 2 * LOGPROB_TOLERANCE
