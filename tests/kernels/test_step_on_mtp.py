"""MTP heads over the GPU kernels, against the step over plain PyTorch: the same chains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from tests.kernels.test_step_on_dflash2 import (
    FEW_HEADS,
    assert_rejection_sampling_is_the_same,
    assert_steps_are_the_same,
)
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, make_executors, prefill
from tests.mtp_files import make_mtp_target

SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "Qwen3.5: gates, norms with offsets, half of a head rotated": {"family": "qwen3_5_text"} | SMALL,
    "Qwen3.5 with experts": {"family": "qwen3_5_moe_text"} | SMALL,
    "GLM-4.5": {"family": "glm4_moe", "num_hidden_layers": 2} | FEW_HEADS,
}


def make_pair(root: Path, name: str) -> tuple[Path, Path]:
    target = make_mtp_target(root / "target", **VARIANTS[name])
    return target, target


@pytest.mark.parametrize("name", VARIANTS)
def test_mtp_over_the_kernels_drafts_as_over_plain_pytorch(tmp_path: Path, device: torch.device, name: str) -> None:
    reference, executor = make_executors(make_pair(tmp_path, name), device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    executor._state.draft_features.tensor.fill_(torch.nan)
    assert_steps_are_the_same(reference, executor)


def test_fp8_pages_of_mtp_have_its_scales(tmp_path: Path, device: torch.device, exact_fp8: None) -> None:
    """Scales of keys and values that differ, written by the launch of one layer."""
    pages = QuantizationSpec(draft_kv=(LayerKvScales(k=0.03, v=0.007),))
    reference, executor = make_executors(make_pair(tmp_path, next(iter(VARIANTS))), device, pages=pages)
    assert executor._state.draft_kv[0].tensor.dtype == torch.float8_e4m3fn
    assert_steps_are_the_same(reference, executor)
    found, expected = (each._state.draft_kv[0].tensor.float().cpu() for each in (executor, reference))
    assert ((found - expected).abs() <= expected.abs() / 8 + 1e-6).all() and expected.abs().amax() > 50


def test_mtp_over_the_kernels_draws_drafts_apart_as_plain_pytorch(tmp_path: Path, device: torch.device) -> None:
    assert_rejection_sampling_is_the_same(*make_executors(make_pair(tmp_path, "GLM-4.5"), device))


def test_a_changed_norm_of_mtp_is_noticed(tmp_path: Path, device: torch.device) -> None:
    """The negative control of the tests above."""
    reference, executor = make_executors(make_pair(tmp_path, next(iter(VARIANTS))), device)
    executor.network.drafter.embedding_norm.neg_()
    batch = StepBatch(requests=(prefill("a", 2, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = (run_batch(each, batch)[0] for each in (executor, reference))
    assert found.emitted_tokens == expected.emitted_tokens and found.draft_tokens != expected.draft_tokens
