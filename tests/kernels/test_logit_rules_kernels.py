"""Logit rules on a GPU against those on a CPU: scores and log-probabilities of rows, then tokens of whole engines."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_trt.backends.cuda.logit_rules import StepRules
from dflash_trt.backends.logit_rules import DeviceRules, mask_tensors
from dflash_trt.backends.slots import PlanInputs
from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.sampling import adjust_scores
from dflash_trt.core.batch import ScheduledRequest, SlotMirror, StepBatch, StepSampling, plan_of
from dflash_trt.core.logit_rules import LogitRules, rules_bytes
from dflash_trt.core.request import Request, SamplingParams
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.kernels.rule_tensors import MaskTensors, RuleTensors
from dflash_trt.kernels.sampling_launch import allocate_outputs
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from tests.kernels.test_step_on_kernels import PAGE_SIZE, Executor, make_executors
from tests.kernels.test_step_on_kernels import pair as pair  # a fixture
from tests.scheduler.driver import make_limits

WIDTH = 4
BAD = ((11,), (4, 1, 12), (9, 2), (1, 5), (2, 6, 13, 14))
RULES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7, "presence_penalty": 0.25, "frequency_penalty": 0.3},
    {},
    {"logit_bias": {3: 2.5, 20: -100.0}, "bad_words": "x", "min_tokens": 6, "repetition_penalty": 0.5},
    {"frequency_penalty": -0.5, "min_tokens": 100},
)


def make_request(name: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_new_tokens": 100, **sampling}),
        stop_token_ids=frozenset((7, 0)),
        bad_word_ids=BAD if "bad_words" in sampling else (),
    )


def make_plan(random: np.random.Generator) -> StepPlan:
    """Verify blocks in contexts of some tokens, half of them the prompt's."""
    rows = []
    for i, sampling in enumerate(RULES):
        known = tuple(random.integers(0, 16, 9 + 4 * i).tolist())
        request = make_request(str(i), known[: len(known) // 2], **sampling)
        row = ScheduledRequest(
            request_id=request.request_id,
            token_ids=tuple(random.choice([1, 2, 6, 9, 13], 1 + i).tolist()),
            context_len=len(known),
            num_candidates=i,
            page_ids=tuple(range(8 * i, 8 * i + 8)),
            sampling=StepSampling(),
            logit_rules=LogitRules.of(request),
            known_tokens=known,
        )
        rows.append(row)
    return plan_of(StepBatch(requests=tuple(rows), num_draft_tokens=WIDTH - 1))


def on_device(plan: StepPlan, batch: StepBatch, device: torch.device) -> tuple[PlanInputs, Any]:
    """The plan's inputs that the rules read, each slot the row's."""
    inputs = step_inputs(batch)
    moved = type(inputs)(**{name: getattr(inputs, name).to(device) for name in type(inputs).__dataclass_fields__})
    counts = torch.from_numpy(plan.rows.num_tokens)
    fields = {name: getattr(moved, name) for name in PlanInputs.__dataclass_fields__ if hasattr(moved, name)}
    fields["slot_ids"] = torch.from_numpy(plan.rows.slot_ids).to(device)
    fields["token_rows"] = torch.arange(len(counts)).repeat_interleave(counts).to(device)
    return PlanInputs(**fields), moved


@pytest.mark.parametrize("vocab_size", [24, 4096 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_and_log_probabilities_are_those_of_the_definition(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    random = np.random.default_rng(3)
    plan = make_plan(random)
    batch = batch_of(plan)
    logits = 3 * torch.randn(len(RULES) * WIDTH, vocab_size, generator=torch.Generator().manual_seed(1))
    logits = logits.to(dtype)
    expected = logits.float().clone()
    for r, row in enumerate(batch.requests):
        if row.logit_rules is not None:
            tokens = np.array([*row.known_tokens, *row.token_ids])
            num_known = len(row.known_tokens) + 1 + np.minimum(np.arange(WIDTH), row.num_candidates)
            adjust_scores(expected[r * WIDTH : (r + 1) * WIDTH], row.logit_rules, tokens, num_known)
    slots = DeviceRules(make_limits(max_batch_size=4), device)
    assert slots.update(plan)
    rules = StepRules(slots, no_masks(vocab_size, device), *on_device(plan, batch, device))
    raw = logits.to(device)
    scores = rules.scores(raw)
    assert torch.equal(scores.cpu(), expected)
    assert not torch.equal(expected, logits.float())
    outputs = allocate_outputs(len(RULES), WIDTH, device)
    outputs.emitted_tokens.copy_(scores.argmax(1).view(len(RULES), WIDTH))
    outputs.emitted_logprobs.fill_(5.0)
    rules.write_logprobs(raw, scores, outputs)
    right = logits.float().log_softmax(1).gather(1, expected.argmax(1)[:, None]).view(len(RULES), WIDTH)
    right[1] = 5.0  # without rules: left to the sampler
    torch.testing.assert_close(outputs.emitted_logprobs.cpu(), right, rtol=0, atol=1e-5)


def no_masks(vocab_size: int, device: torch.device) -> MaskTensors:
    return mask_tensors(None, num_rows=len(RULES) * WIDTH, vocab_size=vocab_size, device=device)


def batch_of(plan: StepPlan) -> StepBatch:
    """The rows of `make_plan`, once more."""
    return SlotMirror(64).assemble(plan, page_size=PAGE_SIZE)


def test_a_row_whose_tokens_are_all_banned_and_one_that_is_not_finite_give_none(device: torch.device) -> None:
    plan = make_plan(np.random.default_rng(3))
    slots = DeviceRules(make_limits(max_batch_size=4), device)
    slots.update(plan)
    rules = StepRules(slots, no_masks(24, device), *on_device(plan, batch_of(plan), device))
    logits = torch.zeros(len(RULES) * WIDTH, 24, device=device)
    logits[0, 3] = torch.nan
    scores = rules.scores(logits)
    scores[2 * WIDTH] = -torch.inf
    outputs = allocate_outputs(len(RULES), WIDTH, device)
    outputs.emitted_tokens.zero_()
    rules.write_logprobs(logits, scores, outputs)
    is_nan = outputs.emitted_logprobs.isnan()[[0, 2, 3]].cpu()
    assert is_nan.nonzero().tolist()[:2] == [[0, 0], [1, 0]]


def test_a_cleared_slot_has_no_rules_and_nothing_is_allocated_before_there_are_any(device: torch.device) -> None:
    slots = DeviceRules(make_limits(max_batch_size=4), device)
    plain = plan_of(StepBatch(requests=(), num_draft_tokens=0))
    assert not slots.update(plain) and slots._tensors is None
    plan = make_plan(np.random.default_rng(3))
    assert slots.update(plan) and slots.tensors.has_rules.tolist() == [1, 0, 1, 1, 0]
    rows = tuple(_without_rules(row) for row in batch_of(plan).requests)
    assert not slots.update(plan_of(StepBatch(requests=rows, num_draft_tokens=WIDTH - 1)))
    assert slots.tensors.has_rules.tolist() == [0] * 5


def test_the_plan_knows_the_memory_of_the_rules(device: torch.device) -> None:
    tensors = RuleTensors.allocate(5, 70, device)
    assert rules_bytes(5, 70) == sum(getattr(tensors, item.name).nbytes for item in fields(RuleTensors))


def _without_rules(row: ScheduledRequest) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=row.request_id,
        token_ids=row.token_ids,
        context_len=row.context_len,
        num_candidates=row.num_candidates,
        page_ids=row.page_ids,
        sampling=row.sampling,
    )


def answers(executor: Executor) -> list[tuple[tuple[int, ...], Tensor]]:
    """One request with rules and one without; the interpreter takes seconds a step."""
    loop = EngineLoop(executor, Scheduler(executor.limits))
    streams = []
    for i, rules in enumerate(RULES[:2]):
        sampling = {"max_new_tokens": 3, "logprobs": True} | rules
        streams.append(loop.submit(make_request(str(i), (5, 6, 5 + i), **sampling)))
    while loop.step():
        pass
    outputs = [stream.result(timeout_s=1) for stream in streams]
    return [(output.token_ids, torch.tensor(output.logprobs)) for output in outputs]


def test_an_engine_on_kernels_gives_the_tokens_of_one_on_pytorch(pair: tuple[Path, Path], device: torch.device) -> None:
    on_pytorch, on_kernels = make_executors(pair, device)
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(
        answers(on_kernels), answers(on_pytorch), strict=True
    ):
        assert tokens == right_tokens
        torch.testing.assert_close(logprobs, right_logprobs, rtol=0, atol=1e-4)  # measured 1e-6 in the interpreter
