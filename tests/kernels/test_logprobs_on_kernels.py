"""A step on the GPU kernels gives the log probabilities that the step on PyTorch gives, beside its graphs."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.backends.cuda.executor import TorchGpuExecutor
from dflash_trt.backends.graphs import Enqueue, GraphCache
from dflash_trt.backends.padding import step_shape
from dflash_trt.core.batch import StepBatch, StepSampling, chained, plan_of
from dflash_trt.core.logprobs import PromptRows, TopRows
from dflash_trt.core.step_plan import StepExecutor, StepPlan, StepResult
from tests.kernels.test_step_on_kernels import LOGPROB_TOLERANCE, NUM_DRAFT_TOKENS, make_executors, prefill
from tests.kernels.test_step_on_kernels import pair as pair

NUM_TOP, NUM_PROMPT_TOP = 5, 3
LENGTHS = (4, 9, 6)


@pytest.fixture(scope="module")
def results(pair: tuple[Path, Path], device: torch.device) -> list[tuple[StepResult, StepResult]]:
    """Of both executors: a step of prompts, and the verify blocks behind it."""
    return [_two_steps(executor) for executor in make_executors(pair, device)]


def _two_steps(executor: StepExecutor) -> tuple[StepResult, StepResult]:
    rows = tuple(
        prefill(f"r{i}", length, StepSampling(), first_page=8 * i) for i, length in enumerate(LENGTHS)
    )  # padded to four requests
    prompts = plan_of(StepBatch(requests=rows, num_draft_tokens=NUM_DRAFT_TOKENS))
    wanted = np.array([0, 1, 2, *range(4, 12)])  # all of two prompts that a token of theirs follows
    scored = PromptRows(
        token_rows=wanted, next_tokens=prompts.rows.token_ids[wanted + 1], num_top_logprobs=NUM_PROMPT_TOP
    )
    top = TopRows.of(np.array([NUM_TOP, 0, NUM_TOP]))
    first = executor.submit(replace(prompts, top_rows=top, prompt_rows=scored)).result()
    return first, executor.submit(replace(_verifying(prompts), top_rows=top)).result()


def _verifying(prompts: StepPlan) -> StepPlan:
    rows = prompts.rows
    count = rows.num_requests
    blocks = replace(
        rows,
        num_tokens=np.full(count, NUM_DRAFT_TOKENS + 1),
        num_candidates=np.full(count, NUM_DRAFT_TOKENS),
        token_ids=np.zeros(count * (NUM_DRAFT_TOKENS + 1), np.int64),
    )
    return chained(replace(prompts, rows=blocks))


def test_the_most_likely_tokens_are_those_of_the_reference(results: list[tuple[StepResult, StepResult]]) -> None:
    for expected, found in zip(*results, strict=True):
        assert expected.top is not None and found.top is not None
        for row, num_accepted in enumerate(expected.num_accepted.tolist()):
            np.testing.assert_array_equal(
                found.top.token_ids[row, : num_accepted + 1], expected.top.token_ids[row, : num_accepted + 1]
            )
            np.testing.assert_allclose(
                found.top.logprobs[row, : num_accepted + 1],
                expected.top.logprobs[row, : num_accepted + 1],
                atol=LOGPROB_TOLERANCE,
            )


def test_so_are_the_log_probabilities_of_prompts(results: list[tuple[StepResult, StepResult]]) -> None:
    (expected, _), (found, _) = results
    assert expected.prompt is not None and found.prompt is not None
    np.testing.assert_allclose(found.prompt.logprobs, expected.prompt.logprobs, atol=LOGPROB_TOLERANCE)
    np.testing.assert_array_equal(found.prompt.top.token_ids, expected.prompt.top.token_ids)
    assert abs(np.roll(found.prompt.logprobs, 1) - expected.prompt.logprobs).max() > 100 * LOGPROB_TOLERANCE


def test_only_the_sampling_of_a_captured_step_that_wants_them_is_launched_anew(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    """The graphs before and after it are replayed; those of prompts need the whole step."""
    reference, executor = make_executors(pair, device)
    assert isinstance(executor, TorchGpuExecutor)
    replayed = record_replays(executor)
    row = prefill("r", 3, StepSampling(), first_page=0)
    plan = plan_of(StepBatch(requests=(row,), num_draft_tokens=NUM_DRAFT_TOKENS))
    executor.warm_up([step_shape(plan, executor.limits)])
    expected = reference.submit(replace(plan, top_rows=TopRows.of(np.array([1])))).result()
    prompt = PromptRows(token_rows=np.array([0]), next_tokens=plan.rows.token_ids[1:2], num_top_logprobs=NUM_PROMPT_TOP)
    for wanted, parts in ((plan, [0, 1, 2]), (replace(plan, top_rows=TopRows.of(np.array([1]))), [0, 2])):
        replayed.clear()
        found = executor.submit(wanted).result()
        assert replayed == parts
        np.testing.assert_array_equal(found.emitted_tokens[:, 0], expected.emitted_tokens[:, 0])
        np.testing.assert_array_equal(found.draft_tokens, expected.draft_tokens)
    assert found.top is not None and expected.top is not None
    np.testing.assert_array_equal(found.top.token_ids[:, 0], expected.top.token_ids[:, 0])
    replayed.clear()
    assert executor.submit(replace(plan, prompt_rows=prompt)).result().prompt is not None and replayed == []


def record_replays(executor: TorchGpuExecutor) -> list[int]:
    """The indices of parts that are replayed from now on. On a CPU a graph stands for what it was captured from."""
    replayed: list[int] = []
    counted = itertools.count()
    real = executor.graphs._capture

    def capture(enqueue: Enqueue) -> Enqueue:
        index, replay = next(counted) % 3, enqueue if real is None else real(enqueue)

        def replay_recorded() -> None:
            replayed.append(index)
            replay()

        return replay_recorded

    executor.graphs = GraphCache(capture)
    return replayed
