"""Retry by bisection: every request that cannot be computed fails for its own reason."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.logprobs import PromptRows, TopRows
from dflash_trt.core.step_plan import StepExecutor, StepHandle, StepPlan, TokenMasks
from dflash_trt.executor.bisection import run_with_bisection
from tests.engines import make_executor
from tests.factories import make_target, make_zlab_drafter
from tests.fake_executor import FakeExecutor
from tests.scheduler.driver import make_limits


class Picky(FakeExecutor):
    """Fails on the first odd token of a batch, by its name."""

    num_tried = 0

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        self.num_tried += 1
        for row in batch.requests:
            if row.token_ids[0] % 2:
                raise ValueError(f"token {row.token_ids[0]}")
        return super().run_rows(batch)


def test_each_failed_request_is_told_its_own_error() -> None:
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}", token_ids=(i,), context_len=0, num_candidates=0, page_ids=(i,), sampling=StepSampling()
        )
        for i in range(6)
    )
    executor = Picky(make_limits(max_batch_size=6))
    result, reasons = run_with_bisection(
        executor, plan_of(StepBatch(requests=rows, num_draft_tokens=2)), ValueError("token 1")
    )
    assert reasons == {i: f"ValueError: token {i}" for i in (1, 3, 5)}
    for i in (0, 2, 4):
        alone = FakeExecutor(executor.limits).submit(plan_of(StepBatch(requests=(rows[i],), num_draft_tokens=2)))
        for name in ("emitted_tokens", "num_accepted", "next_context_lens", "draft_tokens"):
            assert getattr(result, name)[i].tolist() == getattr(alone.result(), name)[0].tolist()


def test_one_request_among_many_is_found_by_halving() -> None:
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}",
            token_ids=(1 if i == 40 else 2,),
            context_len=0,
            num_candidates=0,
            page_ids=(i,),
            sampling=StepSampling(),
        )
        for i in range(64)
    )
    executor = Picky(make_limits(max_batch_size=64, num_pages=64))
    _, reasons = run_with_bisection(executor, plan_of(StepBatch(requests=rows, num_draft_tokens=2)), ValueError())
    assert reasons == {40: "ValueError: token 1"} and executor.num_tried == 2 * 6


VOCAB_SIZE, K, NUM_TOP, NUM_PROMPT_TOP = 12, 3, 4, 2
LENGTHS = (3, 9, 1, 6, 4)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> StepExecutor:
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", vocab_size=VOCAB_SIZE, tokenizer=False)
    drafter = make_zlab_drafter(root / "drafter", target_dir=target, block_size=K + 1)
    return make_executor(target, drafter, has_confidence=True)


class Small:
    """Takes steps of a few rows only."""

    def __init__(self, executor: StepExecutor, max_rows: int) -> None:
        self.executor, self.limits, self.max_rows = executor, executor.limits, max_rows

    def submit(self, plan: StepPlan) -> StepHandle:
        if plan.rows.num_requests > self.max_rows:
            raise MemoryError("too many rows")
        return self.executor.submit(plan)


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_the_parts_of_a_step_give_what_the_whole_gives(executor: StepExecutor, max_rows: int) -> None:
    """Masks, the most likely tokens, and those of prompts included."""
    rows = tuple(
        ScheduledRequest(
            request_id=f"r{i}",
            token_ids=tuple((5 * i + j) % VOCAB_SIZE for j in range(length)),
            context_len=0,
            num_candidates=0,
            page_ids=tuple(range(4 * i, 4 * i + 4)),
            sampling=StepSampling(),
        )
        for i, length in enumerate(LENGTHS)
    )
    plan = plan_of(StepBatch(requests=rows, num_draft_tokens=K))
    free = executor.submit(plan).result()
    banned = [0, 2, 4]  # rows whose likeliest token is forbidden
    bits = np.array([[(1 << VOCAB_SIZE) - 1 - (1 << int(free.emitted_tokens[row, 0]))] for row in banned], np.int32)
    masks = TokenMasks(rows=np.array(banned) * (K + 1), bits=bits)
    scored = np.array([0, 1, 4, 5, 9, 14, 16, 20])
    prompts = PromptRows(token_rows=scored, next_tokens=scored % VOCAB_SIZE, num_top_logprobs=NUM_PROMPT_TOP)
    plan = replace(plan, masks=masks, top_rows=TopRows.of(np.array([NUM_TOP, 0, NUM_TOP, 1, 0])), prompt_rows=prompts)
    whole = executor.submit(plan).result()
    assert (whole.emitted_tokens[:, 0] != free.emitted_tokens[:, 0]).tolist() == [True, False, True, False, True]
    found, reasons = run_with_bisection(Small(executor, max_rows), plan, MemoryError("too many rows"))
    assert not reasons
    for name in ("emitted_tokens", "num_accepted", "next_context_lens", "draft_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), name)
    np.testing.assert_allclose(found.emitted_logprobs, whole.emitted_logprobs, rtol=1e-4)
    assert found.draft_confidence is not None and whole.draft_confidence is not None
    np.testing.assert_allclose(found.draft_confidence, whole.draft_confidence, rtol=1e-4)
    assert found.top is not None and whole.top is not None and found.prompt is not None and whole.prompt is not None
    np.testing.assert_allclose(found.prompt.logprobs, whole.prompt.logprobs, rtol=1e-4)
    for ours, theirs in ((found.top, whole.top), (found.prompt.top, whole.prompt.top)):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4)
