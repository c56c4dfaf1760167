"""A batch as tensors and tensors as a result, field by field."""

import pytest
import torch

from dflash_trt.backends.step_inputs import check_batch, sequence_batch, step_inputs, step_result
from dflash_trt.core.batch import ExecutorLimits, RequestResult, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.network.ops import Acceptance
from dflash_trt.network.step import StepOutputs

PREFILL = ScheduledRequest(
    request_id="prefill",
    token_ids=(7, 8, 9, 10, 11),
    context_len=4,
    num_candidates=0,
    page_ids=(6, 2, 9),
    sampling=StepSampling(temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, seed=2**40 + 1),
)
VERIFY = ScheduledRequest(
    request_id="verify", token_ids=(1, 2, 3), context_len=3, num_candidates=2, page_ids=(4, 5), sampling=StepSampling()
)
BATCH = StepBatch(requests=(PREFILL, VERIFY), num_draft_tokens=3)
LIMITS = ExecutorLimits(
    max_batch_size=2, max_seq_len=9, max_num_tokens=8, max_draft_len=3, page_size=3, num_pages=10
)  # met exactly


def test_every_field_of_a_request_has_its_tensor() -> None:
    inputs = step_inputs(BATCH)
    assert inputs.token_ids.tolist() == [7, 8, 9, 10, 11, 1, 2, 3]
    assert inputs.positions.tolist() == [4, 5, 6, 7, 8, 3, 4, 5]
    assert inputs.token_offsets.tolist() == [0, 5, 8]
    assert inputs.context_lens.tolist() == [4, 3]
    assert inputs.page_table.tolist() == [[6, 2, 9], [4, 5, 0]]
    assert inputs.logit_rows.tolist() == [[4, 4, 4, 4], [5, 6, 7, 7]]
    assert inputs.num_candidates.tolist() == [0, 2]
    assert (inputs.temperature.tolist(), inputs.top_p.tolist()) == ([0.5, 0.0], [0.75, 1.0])
    assert (inputs.top_k.tolist(), inputs.min_p.tolist()) == ([40, 0], [0.25, 0.0])
    assert inputs.seed.tolist() == [2**40 + 1, 0]
    assert {inputs.seed.dtype, inputs.positions.dtype, inputs.top_p.dtype} == {torch.int64, torch.int32, torch.float32}


def test_a_result_has_what_was_emitted_and_no_more() -> None:
    acceptance = Acceptance(
        emitted_tokens=torch.tensor([[11, 12, 13], [21, 22, 23]], dtype=torch.int32),
        emitted_logprobs=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]),
        num_accepted=torch.tensor([0, 2], dtype=torch.int32),
        bonus_tokens=torch.tensor([11, 23], dtype=torch.int32),
        next_context_lens=torch.tensor([9, 6], dtype=torch.int32),
    )
    drafts = torch.tensor([[31, 32], [41, 42]], dtype=torch.int32)
    expected = (
        RequestResult(
            emitted_tokens=(11,), logprobs=(-1.0,), num_accepted=0, draft_tokens=(31, 32), next_context_len=9
        ),
        RequestResult(
            emitted_tokens=(21, 22, 23),
            logprobs=(-4.0, -5.0, -6.0),
            num_accepted=2,
            draft_tokens=(41, 42),
            next_context_len=6,
        ),
    )
    assert step_result(StepOutputs(acceptance=acceptance, draft_tokens=drafts)) == StepResult(requests=expected)
    without = step_result(StepOutputs(acceptance=acceptance, draft_tokens=None))
    assert [row.draft_tokens for row in without.requests] == [(), ()]


def test_a_batch_may_fill_every_limit() -> None:
    check_batch(BATCH, LIMITS)


@pytest.mark.parametrize(
    "limit", [{"max_batch_size": 1}, {"max_seq_len": 8}, {"max_num_tokens": 7}, {"max_draft_len": 2}, {"page_size": 2}]
)
def test_a_batch_beyond_a_limit_is_a_bug(limit: dict[str, int]) -> None:
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
    with pytest.raises(AssertionError):
        check_batch(BATCH, ExecutorLimits(**(fields | limit)))


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (4, 1), (5, 2)])
def test_a_measured_sequence_has_the_pages_it_needs(num_tokens: int, num_pages: int) -> None:
    (row,) = sequence_batch(range(num_tokens), page_size=4).requests
    assert (row.page_ids, row.context_len, row.num_candidates) == (tuple(range(num_pages)), 0, 0)
