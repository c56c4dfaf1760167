"""Masked rows of a step on the GPU kernels: the tokens and log probabilities of the step on PyTorch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.padding import step_shape
from dflash_trt.core.batch import StepBatch, StepSampling, plan_of
from dflash_trt.core.step_plan import StepExecutor, StepPlan, StepResult, TokenMasks
from tests.kernels.test_logprobs_on_kernels import record_replays
from tests.kernels.test_step_on_kernels import LOGPROB_TOLERANCE, NUM_DRAFT_TOKENS, make_executors, prefill
from tests.kernels.test_step_on_kernels import pair as pair

WIDTH = NUM_DRAFT_TOKENS + 1
ALLOWED = {0: [3, 7, 41], 2: [5], 3: []}  # by request; the others may give any token
SAMPLINGS = [StepSampling(), StepSampling(), StepSampling(temperature=0.9, seed=4), StepSampling(temperature=0.9)]


def masks_of(allowed: dict[int, list[int]], vocab_size: int) -> TokenMasks:
    """Of the row behind each prompt, the only one that counts."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    for row, tokens in enumerate(allowed.values()):
        bits[row, tokens] = 1
    packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(rows=np.array(list(allowed)) * WIDTH, bits=packed)


def prompts() -> StepPlan:
    rows = tuple(prefill(f"r{i}", 3 + i, sampling, first_page=8 * i) for i, sampling in enumerate(SAMPLINGS))
    return plan_of(StepBatch(requests=rows, num_draft_tokens=NUM_DRAFT_TOKENS))


def step(executor: StepExecutor, *, masks: TokenMasks | None) -> StepResult:
    return executor.submit(replace(prompts(), masks=masks)).result()


@pytest.fixture(scope="module")
def executors(pair: tuple[Path, Path], device: torch.device) -> list[StepExecutor]:
    return list(make_executors(pair, device))


def test_masked_rows_give_what_pytorch_gives(executors: list[StepExecutor]) -> None:
    reference, executor = executors
    assert isinstance(executor, TorchGpuExecutor)
    masks = masks_of(ALLOWED, executor.network.target.vocab_size)
    expected, found, free = step(reference, masks=masks), step(executor, masks=masks), step(executor, masks=None)
    tokens = found.emitted_tokens[:, 0]
    assert tokens[0] in ALLOWED[0] and tokens[2] == ALLOWED[2][0]
    np.testing.assert_array_equal(tokens[:3], expected.emitted_tokens[:3, 0])
    assert tokens[1] == free.emitted_tokens[1, 0]
    assert (tokens[[0, 2]] != free.emitted_tokens[[0, 2], 0]).any(), "the masks changed nothing"
    logprobs = found.emitted_logprobs[:, 0]
    np.testing.assert_allclose(logprobs[:3], expected.emitted_logprobs[:3, 0], atol=LOGPROB_TOLERANCE)
    assert np.isnan(logprobs[3]) and np.isnan(expected.emitted_logprobs[3, 0]), "no token is left"


def test_only_the_sampling_of_a_captured_step_is_launched_anew_under_masks(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    reference, executor = make_executors(pair, device)
    assert isinstance(executor, TorchGpuExecutor)
    replayed = record_replays(executor)
    executor.warm_up([step_shape(prompts(), executor.limits)])
    masks = masks_of(ALLOWED, executor.network.target.vocab_size)
    replayed.clear()
    expected, found = step(reference, masks=masks), step(executor, masks=masks)
    assert replayed == [0, 2]
    np.testing.assert_array_equal(found.emitted_tokens[:3, 0], expected.emitted_tokens[:3, 0])
    np.testing.assert_array_equal(found.draft_tokens[:2], expected.draft_tokens[:2])
