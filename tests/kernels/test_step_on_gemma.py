"""Gemma over the GPU kernels: two geometries of pages in one step, against the step over plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.factories import make_zlab_drafter
from tests.gemma_targets import EVERYTHING, make_gemma
from tests.kernels.test_step_on_kernels import (
    FP8_LOGPROB_TOLERANCE,
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
EVERY_PART = "4, experts, per-layer embeddings, shared K/V"
TARGETS: dict[str, dict[str, Any]] = {
    "3": {"family": "gemma3_text"},
    "4, heads of 16 and 512": {"family": "gemma4_text", "global_head_dim": 512, "num_attention_heads": 3},
    EVERY_PART: {
        "family": "gemma4_text",
        **EVERYTHING,
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, FULL, FULL],
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": 280,
    },
}


def make_pair(root: Path, fields: dict[str, Any]) -> tuple[Path, Path]:
    options = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **FEW_HEADS} | fields
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
    reference, executor = make_executors(make_pair(tmp_path, TARGETS[name]), device)
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


def test_a_changed_scale_is_noticed(tmp_path: Path, device: torch.device) -> None:
    """The negative control of the test above: of a layer, and of results of experts."""
    reference, executor = make_executors(make_pair(tmp_path, TARGETS[EVERY_PART]), device)
    layer = executor.network.target_weights.layers[0]
    request = prefill("greedy", 3, StepSampling(), first_page=0)
    batch = StepBatch(requests=(request,), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)[0].logprobs[0]
    of_half = layer.feed_forward.experts.down.row_scale[::2]  # a norm follows: all of them scaled would be the same
    for scales in (layer.output_scale, of_half):
        with executor.on_stream():
            scales.mul_(1.25)
        assert abs(run_batch(executor, batch)[0].logprobs[0] - expected) > 2 * LOGPROB_TOLERANCE
        with executor.on_stream():
            scales.div_(1.25)
    assert run_batch(executor, batch)[0].logprobs[0] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_codes")
@pytest.mark.parametrize("weight_format", [None, "fp8", "int8", "nvfp4_w4a16"])
def test_fp8_pages_of_layers_that_share_them_give_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, weight_format: str | None
) -> None:
    pair = make_pair(tmp_path, TARGETS[EVERY_PART])
    scales = tuple(LayerKvScales(k=0.02 + 0.01 * i, v=0.01 + 0.002 * i) for i in range(3))
    pages = QuantizationSpec(target_kv=scales)
    reference, executor = make_executors(pair, device, weight_format=weight_format, pages=pages)
    batch, expected = start(reference)
    found = run_batch(executor, batch)
    for row, other in zip(found, expected, strict=True):
        assert (row.emitted_tokens, row.draft_tokens) == (other.emitted_tokens, other.draft_tokens)
        assert row.logprobs == pytest.approx(other.logprobs, abs=FP8_LOGPROB_TOLERANCE)
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    assert executor._state.target_kv[2].spec.scales == scales[1], "those of the layer that wrote the pages"
    for row, other in zip(run_batch(executor, batch), run_batch(reference, batch), strict=True):
        assert row.logprobs == pytest.approx(other.logprobs, abs=FP8_LOGPROB_TOLERANCE)
