"""DFlash2 over the GPU kernels, against the step over plain PyTorch: the same drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.core.batch import StepBatch, StepSampling, chained, plan_of, request_results, run_batch
from dflash_trt.network.drafters.dflash2 import DFlash2Drafter
from tests.dflash2_files import make_dflash2_drafter
from tests.factories import make_target
from tests.kernels.test_step_on_kernels import NUM_DRAFT_TOKENS, assert_same, make_executors, next_batch, prefill

SAMPLED = StepSampling(temperature=0.9, seed=2**33 + 5)
FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_dflash2_pair(root: Path, **options: Any) -> tuple[Path, Path]:
    target = make_target(root / "target", num_hidden_layers=2, **FEW_HEADS)
    sizes = {"target_layer_ids": (0,), "block_size": NUM_DRAFT_TOKENS + 1, **FEW_HEADS}
    return target, make_dflash2_drafter(root / "drafter", target_dir=target, **sizes, **options)


def assert_steps_are_the_same(reference: Any, executor: Any) -> None:
    """Prompts, a verify block beside a prompt, and a step of one draft that the device fills in."""
    requests = (prefill("greedy", 5, StepSampling(), first_page=0), prefill("sampled", 2, SAMPLED, first_page=10))
    batch = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=lambda r: 2)
    late = prefill("late", 3, SAMPLED, first_page=30)
    batch = StepBatch(requests=(batch.requests[0], late), num_draft_tokens=NUM_DRAFT_TOKENS)
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    batch = next_batch(batch, expected, num_candidates=lambda r: 1)
    batch = StepBatch(requests=batch.requests, num_draft_tokens=1)
    expected = run_batch(reference, batch)
    assert_same(request_results(executor.submit(chained(plan_of(batch))).result()), expected)
    assert [len(row.draft_tokens) for row in expected] == [1, 1]


def assert_rejection_sampling_is_the_same(reference: Any, executor: Any, *, num_steps: int = 5) -> None:
    """Chained steps with rejection sampling in some requests: tokens, drafts, and their candidates in slots."""
    apart = replace(SAMPLED, temperature=6.0, seed=11, draft_stream=1)  # at which target and drafter are alike
    samplings = (StepSampling(), apart, SAMPLED, replace(apart, top_p=0.9, seed=2**40 + 1))
    prompts = [prefill(str(i), 2 + i, sampling, first_page=12 * i) for i, sampling in enumerate(samplings)]
    vocab_size = reference.network.target.vocab_size
    requests = tuple(replace(x, token_ids=tuple(token % vocab_size for token in x.token_ids)) for x in prompts)
    batch, uses_rejection = StepBatch(requests=requests, num_draft_tokens=NUM_DRAFT_TOKENS), torch.tensor([1, 3])
    expected = run_batch(reference, batch)
    assert_same(run_batch(executor, batch), expected)
    num_accepted = []
    for _ in range(num_steps):
        ours, theirs = executor._staging.slots, reference._slots
        assert ours.token_ids.cpu().tolist()[:4] == theirs.token_ids.tolist()[:4]
        assert ours.draft_topk_ids.cpu()[uses_rejection].tolist() == theirs.draft_topk_ids[uses_rejection].tolist()
        torch.testing.assert_close(
            ours.draft_topk_probs.cpu()[uses_rejection], theirs.draft_topk_probs[uses_rejection], rtol=1e-3, atol=1e-5
        )
        sums = theirs.draft_topk_probs[uses_rejection].view(2 * NUM_DRAFT_TOKENS, -1).sum(dim=1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        batch = next_batch(batch, expected, num_candidates=lambda r: NUM_DRAFT_TOKENS)
        plan = chained(plan_of(batch))
        expected = request_results(reference.submit(plan).result())
        assert_same(request_results(executor.submit(plan).result()), expected)
        num_accepted += [expected[r].num_accepted for r in uses_rejection.tolist()]
    assert 0 < sum(num_accepted) < NUM_DRAFT_TOKENS * len(num_accepted), "some drafts are accepted, some rejected"


@pytest.fixture(scope="module")
def dflash2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    scaled = {"output_multiplier": 0.4, "final_logit_softcapping": 3.0}
    return make_dflash2_pair(tmp_path_factory.mktemp("dflash2"), keys=scaled)


def test_dflash2_over_the_kernels_drafts_as_over_plain_pytorch(
    dflash2: tuple[Path, Path], device: torch.device
) -> None:
    reference, executor = make_executors(dflash2, device)
    for pages in executor.pages:
        pages.fill_(torch.nan)  # as another request may have left them
    assert_steps_are_the_same(reference, executor)


def test_dflash2_over_the_kernels_draws_drafts_apart_as_plain_pytorch(tmp_path: Path, device: torch.device) -> None:
    pair = make_dflash2_pair(tmp_path, top_k=48, keys={"output_multiplier": 0.1})  # scores that are nearly flat
    assert_rejection_sampling_is_the_same(*make_executors(pair, device))


def test_a_changed_part_of_dflash2_is_noticed(dflash2: tuple[Path, Path], device: torch.device) -> None:
    """The negative control of the test above."""
    reference, executor = make_executors(dflash2, device)
    drafter = executor.network.drafter
    assert isinstance(drafter, DFlash2Drafter)
    drafter.layers[1].mlp_conv.base_after.neg_()
    batch = StepBatch(requests=(prefill("a", 2, StepSampling(), first_page=0),), num_draft_tokens=NUM_DRAFT_TOKENS)
    found, expected = (run_batch(each, batch)[0] for each in (executor, reference))
    assert found.emitted_tokens == expected.emitted_tokens and found.draft_tokens != expected.draft_tokens
