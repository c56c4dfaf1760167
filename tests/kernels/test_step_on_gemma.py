"""Gemma over the GPU kernels: two geometries of pages in one step, against the step over plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.factories import make_zlab_drafter
from tests.gemma_targets import EXPERTS, PER_LAYER, make_gemma
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
SLIDING, FULL = "sliding_attention", "full_attention"
TARGETS: dict[str, dict[str, Any]] = {
    "3": {"family": "gemma3_text"},
    "4, heads of 16 and 512": {"family": "gemma4_text", "global_head_dim": 512, "num_attention_heads": 3},
    "4, experts beside the MLP": {"family": "gemma4_text", **EXPERTS},
    "4, per-layer embeddings and shared K/V": {
        "family": "gemma4_text",
        **PER_LAYER,
        "vocab_size_per_layer_input": 280,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
}


def make_pair(root: Path, name: str) -> tuple[Path, Path]:
    options = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **FEW_HEADS} | TARGETS[name]
    target = make_gemma(root / "target", vocab_size=272, **options)
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


@pytest.mark.parametrize("name", TARGETS)
def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, name: str
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, name), device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    if name == "3":  # the rest is the same, and steps on a CPU take long
        return
    batch = next_batch(batch, expected, num_candidates=(2, 1).__getitem__)
    late = prefill("late", 9, StepSampling(), first_page=30)  # a prefill chunk, longer than a window, beside blocks
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    if "512" not in name:
        return
    batch = next_batch(batch, expected, num_candidates=lambda r: 0)
    batch = StepBatch(requests=batch.requests, num_draft_tokens=0)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


@pytest.mark.parametrize("name", ["4, heads of 16 and 512", "4, experts beside the MLP"])
def test_a_changed_scale_is_noticed(tmp_path: Path, device: torch.device, name: str) -> None:
    """The negative control of the test above: of a layer, and of an expert's results."""
    reference, executor = make_executors(make_pair(tmp_path, name), device)
    layer = executor.network.target_weights.layers[0]
    if "experts" in name:  # of half of them: a norm follows
        layer.feed_forward.experts.down.row_scale[::2].mul_(1.1)
    else:
        layer.output_scale.mul_(1.1)
    batch, expected = start(reference)
    found = run_batch(executor, batch)
    assert abs(found[0].logprobs[0] - expected[0].logprobs[0]) > 2 * LOGPROB_TOLERANCE
