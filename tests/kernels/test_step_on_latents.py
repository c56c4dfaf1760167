"""Latent attention over the GPU kernels, step for step against plain PyTorch, and what a GPU refuses of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda.backend import model_problems
from dflash_trt.backends.cuda.experts import DeviceExperts
from dflash_trt.backends.cuda.linear import DevicePackedWeight
from dflash_trt.checkpoint.pair import open_pair
from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.kernels.launch_rules import PLAIN
from dflash_trt.network.mixers.mla import MlaWeights
from tests.factories import make_target, make_zlab_drafter
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, assert_same, make_executors, next_batch, prefill, start

LOGIT_TOLERANCE = 3e-5  # of logits up to 10; measured in the interpreter: 7e-6
FP8_TOLERANCE = 0.05  # on a GPU a number on the border of two codes may go either way; in the interpreter: 7e-6
SMALL = {"num_hidden_layers": 2, "n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 4}


def make_pair(root: Path, **options: Any) -> tuple[Path, Path]:
    """A layer with an MLP and one with experts."""
    target = make_target(root / "target", family="deepseek_v3", **SMALL | options)
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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_steps_over_the_kernels_give_the_tokens_of_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    reference, executor = make_executors(pair, device)
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=(2, 0).__getitem__)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    late = prefill("late", 5, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)


def test_q_without_a_latent_and_halves_rotated_have_the_logits_of_plain_pytorch(
    tmp_path: Path, device: torch.device
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, q_lora_rank=None, rope_interleave=False), device)
    tokens = [5, 9, 2, 7, 30, 8]
    expected = reference.target_logits(tokens)
    torch.testing.assert_close(executor.target_logits(tokens).cpu(), expected, rtol=0, atol=LOGIT_TOLERANCE)


def test_a_prompt_that_begins_has_the_logits_of_plain_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    """Of as many tokens as make it direct."""
    reference, executor = make_executors(pair, device, max_num_tokens=64)
    tokens = [3 + index * index % 50 for index in range(64)]
    expected = reference.target_logits(tokens)
    torch.testing.assert_close(executor.target_logits(tokens).cpu(), expected, rtol=0, atol=LOGIT_TOLERANCE)


def test_fp8_pages_have_the_logits_of_plain_pytorch(
    pair: tuple[Path, Path], device: torch.device, exact_fp8: None
) -> None:
    """The negative control are pages with the scales of other layers."""
    scales = (LayerKvScales(k=0.01, v=0.01), LayerKvScales(k=0.013, v=0.013))
    tokens = [5, 9, 2, 7, 30, 8]
    found = []
    for of_layers in (scales, scales[::-1]):
        pages = QuantizationSpec(target_kv=of_layers)
        reference, executor = make_executors(pair, device, pages=pages)
        found.append(executor.target_logits(tokens).cpu())
        if of_layers == scales:
            expected = reference.target_logits(tokens)
    assert (found[0] - expected).abs().max() < FP8_TOLERANCE
    assert (found[1] - expected).abs().max() > 3 * FP8_TOLERANCE


@pytest.mark.parametrize("weight_format", ["int4", "nvfp4_w4a16"])
def test_experts_and_projections_stay_packed(
    pair: tuple[Path, Path], device: torch.device, weight_format: str, exact_codes: None
) -> None:
    """Formats in which Kimi-K2 is published; the factors of latents are never packed."""
    reference, executor = make_executors(pair, device, weight_format=weight_format)
    layer = executor.network.target_weights.layers[1]
    assert isinstance(layer.mixer, MlaWeights) and isinstance(layer.mixer.kv_a.weight, DevicePackedWeight)
    experts = layer.feed_forward.experts
    assert isinstance(experts, DeviceExperts) and experts.gate_up.form != PLAIN
    tokens = [5, 9, 2, 7]
    expected = reference.target_logits(tokens)
    torch.testing.assert_close(executor.target_logits(tokens).cpu(), expected, rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", ["kv_b", "kv_a_norm", "q_a_norm"])
def test_a_changed_weight_is_noticed(pair: tuple[Path, Path], device: torch.device, name: str) -> None:
    """The negative control of the tests above."""
    reference, executor = make_executors(pair, device)
    mixer = executor.network.target_weights.layers[0].mixer
    assert isinstance(mixer, MlaWeights)
    getattr(mixer, name)[:1].add_(1.0)
    tokens = [5, 9, 2, 7]
    found, expected = executor.target_logits(tokens), reference.target_logits(tokens)
    assert (found.cpu() - expected).abs().max() > 100 * LOGIT_TOLERANCE


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({}, None), ({"kv_lora_rank": 520}, "latent_dim of latent attention: expected at most 512 on a GPU, found 520")],
)
def test_what_the_kernels_are_made_for_is_not_refused(
    tmp_path: Path, changes: dict[str, int], problem: str | None
) -> None:
    target, _ = make_pair(tmp_path, **changes)
    found = list(model_problems(open_pair(target, None).target, None))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
