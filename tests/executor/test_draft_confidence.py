"""The confidence of drafts: the probability of the drafter's most likely token, on a CPU where K is adaptive."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.backends.torch.executor import TorchExecutor
from dflash_trt.core.batch import StepBatch, StepSampling, plan_of
from tests.dflash2_files import make_dflash2_drafter
from tests.eagle3_files import save_eagle3_head
from tests.engines import Decoding, make_executor
from tests.factories import make_target, make_zlab_drafter

K = 3
PROMPTS = [[5, 9, 2, 3], [1, 2, 3, 4, 5], [7]]
SAMPLED = StepSampling(temperature=1.0, seed=9, draft_stream=1)
MAKERS = {"dflash": make_zlab_drafter, "dflash2": make_dflash2_drafter, "eagle3": save_eagle3_head}


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_it_is_the_largest_probability_that_a_draft_is_sampled_from(
    tmp_path: Path, make: Callable[..., Path], has_kernels: bool
) -> None:
    """Of 12 tokens all are candidates, so that these probabilities are those of the whole vocabulary."""
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False)
    executor = make_executor(
        target, make(tmp_path / "drafter", target_dir=target), has_kernels=has_kernels, has_confidence=True
    )
    assert executor.limits.has_draft_confidence
    parts = tuple(
        Decoding(executor, prompt, tuple(range(8 * i, 8 * i + 8)), SAMPLED).prefill_part(100)
        for i, prompt in enumerate(PROMPTS)
    )
    result = executor.submit(plan_of(StepBatch(requests=parts, num_draft_tokens=K))).result()
    assert result.draft_confidence is not None and result.draft_confidence.shape == (3, K)
    topk_probs = executor._slots.draft_topk_probs.numpy()
    slots = plan_of(StepBatch(requests=parts, num_draft_tokens=K)).rows.slot_ids
    largest = topk_probs[slots].reshape(3, executor.limits.max_draft_len, -1)[:, :K].max(-1)
    np.testing.assert_allclose(result.draft_confidence, largest, rtol=1e-5)
    assert len(np.unique(largest)) > K, "otherwise the test says little"


def test_nobody_pays_for_it_unasked(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", vocab_size=12, tokenizer=False)
    executor: TorchExecutor = make_executor(target, make_zlab_drafter(tmp_path / "drafter", target_dir=target))
    part = Decoding(executor, PROMPTS[0], tuple(range(8)), SAMPLED).prefill_part(100)
    result = executor.submit(plan_of(StepBatch(requests=(part,), num_draft_tokens=K))).result()
    assert result.draft_confidence is None and not executor.limits.has_draft_confidence
