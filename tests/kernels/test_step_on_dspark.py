"""DSpark over the GPU kernels, against the step over plain PyTorch: the same drafts and confidences."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.graphs import GraphCache
from dflash_trt.backends.padding import decode_shapes
from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from dflash_trt.network.drafters.dspark import DSparkDrafter
from tests.dspark_files import Listener, save_dspark_drafter
from tests.factories import make_target
from tests.kernels.test_step_on_dflash2 import (
    FEW_HEADS,
    assert_rejection_sampling_is_the_same,
    assert_steps_are_the_same,
)
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, make_executors, prefill

VARIANTS: dict[str, dict[str, Any]] = {
    "rnn, reduced vocabulary": {"markov_head_type": "rnn", "draft_tokens": range(3, 260, 2)},
    "gated, the anchor's slot makes no draft": {
        "markov_head_type": "gated",
        "sample_from_anchor": False,
        "block_size": NUM_DRAFT_TOKENS + 1,
    },
}


def make_pair(root: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=2, **FEW_HEADS)
    sizes = {"aux_hidden_state_layer_ids": (1,), "block_size": NUM_DRAFT_TOKENS}
    return target, save_dspark_drafter(root / "drafter", target_dir=target, **sizes | options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if i else ())
        for i, (name, options) in enumerate(VARIANTS.items())
    ],
)
def test_dspark_over_the_kernels_drafts_as_over_plain_pytorch(
    tmp_path: Path, device: torch.device, options: dict[str, Any]
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, options), device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    if device.type == "cpu":
        executor.graphs = GraphCache(lambda enqueue: enqueue)
    [shape] = [s for s in decode_shapes(executor.limits, num_draft_tokens=1) if s.num_requests == 1]
    executor.warm_up([shape])
    theirs, ours = Listener(reference), Listener(executor)
    assert_steps_are_the_same(theirs, ours)
    assert [confidence.shape for confidence in theirs.confidences] == [(2, NUM_DRAFT_TOKENS)] * 2 + [(2, 1)]
    for found, expected in zip(ours.confidences, theirs.confidences, strict=True):
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol=0, atol=1e-5)


def test_dspark_over_the_kernels_draws_drafts_apart_as_plain_pytorch(tmp_path: Path, device: torch.device) -> None:
    assert_rejection_sampling_is_the_same(*make_executors(make_pair(tmp_path, {}), device))


def test_an_fp8_drafter_drafts_as_over_plain_pytorch(tmp_path: Path, device: torch.device) -> None:
    executors = make_executors(make_pair(tmp_path, {"markov_head_type": "gated"}), device, weight_format="fp8")
    batch = StepBatch(requests=(prefill("a", 5, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected, found = (run_batch(executor, batch) for executor in executors)
    assert [row.draft_tokens for row in found] == [row.draft_tokens for row in expected]


def test_a_changed_bias_of_dspark_is_noticed(tmp_path: Path, device: torch.device) -> None:
    """The negative control of the tests above."""
    reference, executor = make_executors(make_pair(tmp_path, {}), device)
    drafter = executor.network.drafter
    assert isinstance(drafter, DSparkDrafter)
    drafter.bias.weight.neg_()
    batch = StepBatch(requests=(prefill("a", 2, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = (run_batch(each, batch)[0] for each in (executor, reference))
    assert found.emitted_tokens == expected.emitted_tokens and found.draft_tokens != expected.draft_tokens
