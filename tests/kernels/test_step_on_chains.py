"""EAGLE-3 over the GPU kernels, against the step over plain PyTorch: the same chains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda import ops as cuda_ops
from dflash_trt.backends.cuda.ops import TorchGpuOps
from dflash_trt.backends.graphs import GraphCache
from dflash_trt.backends.padding import decode_shapes
from dflash_trt.core.batch import StepBatch, StepSampling, run_batch
from tests.eagle3_files import save_eagle3_head
from tests.factories import make_target
from tests.kernels.test_step_on_dflash2 import (
    FEW_HEADS,
    assert_rejection_sampling_is_the_same,
    assert_steps_are_the_same,
)
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, assert_same, make_executors, next_batch, prefill

VARIANTS: dict[str, dict[str, Any]] = {
    "normed residual, a window": {"norm_before_residual": True, "sliding_window": 6},
    "Qwen3's layer, normed features": {"architecture": "qwen3", "norm_output": True, "fc_norm": True},
}


def make_pair(root: Path, options: dict[str, Any]) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=2, **FEW_HEADS)
    sizes = {"aux_hidden_state_layer_ids": (1, 2), "draft_tokens": range(3, 260, 2)}
    return target, save_eagle3_head(root / "head", target_dir=target, **sizes, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if i else ())
        for i, (name, options) in enumerate(VARIANTS.items())
    ],
)
def test_eagle3_over_the_kernels_drafts_as_over_plain_pytorch(
    tmp_path: Path, device: torch.device, options: dict[str, Any]
) -> None:
    reference, executor = make_executors(make_pair(tmp_path, options), device)
    for pages in executor.pages:
        pages.fill_(torch.nan)
    features = executor._state.draft_features.tensor.fill_(torch.nan)  # as another request may have left them
    if device.type == "cpu":
        executor.graphs = GraphCache(lambda enqueue: enqueue)
    [shape] = [s for s in decode_shapes(executor.limits, num_draft_tokens=1) if s.num_requests == 1]
    executor.warm_up([shape])
    assert features.isnan().all() and executor.graphs.num_graphs == 1  # padding alone touches no page
    assert_steps_are_the_same(reference, executor)


def test_eagle3_over_the_kernels_draws_drafts_apart_as_plain_pytorch(tmp_path: Path, device: torch.device) -> None:
    """Through a draft vocabulary, and one draft of a request at a time."""
    assert_rejection_sampling_is_the_same(*make_executors(make_pair(tmp_path, {}), device))


@pytest.mark.parametrize("part", ["features in pages", "the first key", "the noise of a later slot"])
def test_a_changed_part_of_eagle3_is_noticed(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The negative controls of the test above: each changes some draft, and no token."""
    reference, executor = make_executors(make_pair(tmp_path, {}), device)
    sampling = StepSampling(temperature=1.5, seed=3)
    requests = tuple(prefill(str(i), 2 + i, sampling, first_page=10 * i) for i in range(2))
    batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
    if part == "the first key":
        honest = cuda_ops._options
        monkeypatch.setattr(cuda_ops, "_options", lambda *given: _with_all_keys(honest(*given)))
    elif part == "the noise of a later slot":
        honest_drafts = TorchGpuOps.draft_tokens
        first_noise = lambda *given, **options: honest_drafts(*given, **options | {"first_slot": 1})  # noqa: E731
        monkeypatch.setattr(TorchGpuOps, "draft_tokens", first_noise)
    expected = run_batch(reference, batch)
    found = run_batch(executor, batch)
    if part == "features in pages":
        assert_same(found, expected)
        executor._state.draft_features.tensor.neg_()
        batch = next_batch(batch, expected, num_candidates=lambda r: 0)
        found, expected = (run_batch(each, batch) for each in (executor, reference))
    assert [row.emitted_tokens for row in found] == [row.emitted_tokens for row in expected]
    assert [row.draft_tokens for row in found] != [row.draft_tokens for row in expected]


def _with_all_keys(options: Any) -> Any:
    return type(options)(**{name: getattr(options, name) for name in options.__slots__} | {"first_key": 0})
