"""Targets with experts and sinks over the GPU kernels, against the step over plain PyTorch.

Experts run in a grouped GEMM. Without it, verify blocks, which a graph captures, run every expert, and a step with a
prefill chunk the chosen ones.
"""

from pathlib import Path

import pytest
import torch

from dflash_trt.backends.cuda import ops as torch_gpu_ops
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

FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_pair(root: Path, family: Family) -> tuple[Path, Path]:
    target = make_target(root / "target", family=family, num_hidden_layers=2, **FEW_HEADS)
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


@pytest.mark.parametrize("has_grouped_gemm", [True, False], ids=["grouped GEMM", "no grouped GEMM"])
def test_a_step_over_the_kernels_gives_the_tokens_of_plain_pytorch(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, has_grouped_gemm: bool
) -> None:
    if device.type == "cpu":  # in float32 a GPU has none
        monkeypatch.setattr(torch_gpu_ops, "has_grouped_gemm", lambda x: has_grouped_gemm)
    ways = []
    for name in ("run_all_experts", "run_chosen_experts", "run_grouped_experts"):
        way = getattr(torch_gpu_ops, name)
        monkeypatch.setattr(torch_gpu_ops, name, lambda *args, way=way: ways.append(way.__name__) or way(*args))
    reference, executor = make_executors(make_pair(tmp_path, "gpt_oss"), device)
    executor._asks_host = not has_grouped_gemm or device.type != "cpu"
    batch, expected = start(reference)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=(2, 1).__getitem__)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    is_grouped = has_grouped_gemm and device.type == "cpu"
    late = prefill("late", 3, StepSampling(), first_page=30)  # a prefill chunk beside verify blocks
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    batch = StepBatch(requests=(*batch.requests, late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    assert set(ways) == ({"run_grouped_experts"} if is_grouped else {"run_all_experts", "run_chosen_experts"})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_changed_expert_or_sink_is_noticed(tmp_path: Path, device: torch.device, family: Family) -> None:
    """The negative control of the test above; without the change the step is as plain PyTorch gives it."""
    reference, executor = make_executors(make_pair(tmp_path, family), device)
    layer = executor.network.target_weights.layers[1]
    sinks = layer.mixer.sinks
    batch = StepBatch(requests=(prefill("greedy", 3, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)[0].logprobs[0]
    for perturbed in [layer.feed_forward.down] + ([] if sinks is None else [sinks]):
        original = perturbed.clone()
        perturbed.add_(0.1)
        assert abs(run_batch(executor, batch)[0].logprobs[0] - expected) > 10 * LOGPROB_TOLERANCE
        perturbed.copy_(original)
    found = run_batch(executor, batch)[0]
    assert found.logprobs[0] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
