"""A plan as tensors and tensors as a result, field by field; chained rows filled from their slots."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflash_trt.backends.padding import decode_shape, exact_shape, verify_block_shape
from dflash_trt.backends.sequence_batch import sequence_batch
from dflash_trt.backends.slots import DeviceSlots
from dflash_trt.backends.staging import InputStaging, ResultStaging
from dflash_trt.backends.step_inputs import HostInputs, check_plan, step_inputs, step_result
from dflash_trt.backends.torch.native.library import CpuKernels, cpu_kernels
from dflash_trt.backends.torch.native.slots import NativeSlots
from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepBatch, StepSampling, plan_of, request_results
from dflash_trt.core.step_plan import CHAINED, ExecutorLimits, JointRows
from dflash_trt.core.step_spec import ASSEMBLED, DRAFT_INPUTS, PLAN_INPUTS, STEP_INPUTS
from dflash_trt.network.ops import Acceptance, StepInputs
from dflash_trt.network.proposal import Proposal
from dflash_trt.network.step import StepOutputs
from tests.fake_executor import result_of
from tests.reference_inputs import reference_inputs

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
    max_batch_size=2, max_seq_len=6, max_num_tokens=8, max_draft_len=3, page_size=3, num_pages=10
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
    result = step_result(StepOutputs(acceptance=acceptance, proposal=Proposal(tokens=drafts)))
    acceptance.num_accepted.fill_(0)  # the next step may write while the host reads
    assert request_results(result) == expected
    without = step_result(StepOutputs(acceptance=acceptance, proposal=None))
    assert [row.draft_tokens for row in request_results(without)] == [(), ()]


def test_rows_that_are_written_out_and_arrays_are_the_same_result() -> None:
    rows = (
        RequestResult(
            emitted_tokens=(4, 5), logprobs=(-1.0, -2.0), num_accepted=1, draft_tokens=(6, 7), next_context_len=9
        ),
        RequestResult(
            emitted_tokens=(8,),
            logprobs=(-0.5,),
            num_accepted=1,
            draft_tokens=(),
            next_context_len=4,
            non_finite_position=3,
        ),
    )
    assert request_results(result_of(rows, num_draft_tokens=2)) == rows


def test_a_batch_may_fill_every_limit() -> None:
    check_plan(plan_of(BATCH), LIMITS)


@pytest.mark.parametrize(
    "limit", [{"max_batch_size": 1}, {"max_seq_len": 5}, {"max_num_tokens": 7}, {"max_draft_len": 2}, {"page_size": 2}]
)
def test_a_batch_beyond_a_limit_is_a_bug(limit: dict[str, int]) -> None:
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
    with pytest.raises(AssertionError):
        check_plan(plan_of(BATCH), ExecutorLimits(**(fields | limit)))


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(1, 1), (4, 1), (5, 2)])
def test_a_measured_sequence_has_the_pages_it_needs(num_tokens: int, num_pages: int) -> None:
    (row,) = sequence_batch(range(num_tokens), page_size=4).requests
    assert (row.page_ids, row.context_len, row.num_candidates) == (tuple(range(num_pages)), 0, 0)


batches = st.builds(
    lambda rows, k: StepBatch(
        requests=tuple(_request(number, *row, k) for number, row in enumerate(rows)), num_draft_tokens=k
    ),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.integers(0, 4), st.integers(0, 99)), min_size=1),
    st.integers(0, 4),
)


def _request(number: int, num_tokens: int, context_len: int, candidates: int, first_page: int, k: int):
    return ScheduledRequest(
        request_id=str(number),
        token_ids=tuple(range(100 * number + 1, 100 * number + 1 + num_tokens)),
        context_len=context_len,
        num_candidates=min(candidates, k, num_tokens - 1),
        page_ids=tuple(range(first_page, first_page - (-(context_len + num_tokens) // 4))),
        sampling=StepSampling(
            temperature=number / 8, top_k=number, top_p=1 / (number + 1), min_p=0.125, seed=first_page
        ),
    )


def one_row(context_len: int) -> StepBatch:
    return StepBatch(requests=(_request(0, 1, context_len, 0, 0, 0),), num_draft_tokens=0)


def same(found, expected) -> bool:
    """What slots keep of drafts, which rows written out do not have, is compared apart."""
    names = [item.name for item in fields(expected) if item.name not in DRAFT_INPUTS]
    pairs = [(getattr(found, name), getattr(expected, name)) for name in names]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


ROOMY = ExecutorLimits(
    max_batch_size=64, max_seq_len=40, max_num_tokens=600, max_draft_len=4, page_size=4, num_pages=200, draft_topk=3
)

KERNELS = cpu_kernels()
SLOTS: dict[str, Callable[[ExecutorLimits], DeviceSlots]] = {"PyTorch": DeviceSlots}
if isinstance(KERNELS, CpuKernels):
    SLOTS["CPU kernels"] = partial(NativeSlots, kernels=KERNELS)


@pytest.mark.parametrize("make_slots", SLOTS.values(), ids=SLOTS)
@settings(deadline=None)
@given(sequence=st.lists(batches, min_size=1, max_size=4))
@example(
    sequence=[
        one_row(12),
        one_row(4),
        StepBatch(requests=(*one_row(4).requests, *one_row(0).requests), num_draft_tokens=0),
    ]
)
def test_whatever_was_packed_before_a_batch_is_packed_as_the_reference_does(
    make_slots: Callable[[ExecutorLimits], DeviceSlots], sequence: list[StepBatch]
) -> None:
    inputs, slots = HostInputs(ROOMY), make_slots(ROOMY)
    for batch in sequence:
        plan = plan_of(batch)
        expected = reference_inputs(batch)
        found = inputs.assemble(plan, exact_shape(plan), slots)
        pads = torch.arange(expected.page_table.shape[1]) >= torch.tensor([[len(r.page_ids)] for r in batch.requests])
        found = replace(found, page_table=found.page_table.masked_fill(pads, 0))  # of requests before, never read
        assert same(found, expected)
        assert same(step_inputs(batch), expected)


@pytest.mark.parametrize("make_slots", SLOTS.values(), ids=SLOTS)
@settings(deadline=None)
@given(batch=batches, data=st.data())
def test_a_chained_row_is_the_row_that_the_host_would_have_given(
    make_slots: Callable[[ExecutorLimits], DeviceSlots], batch: StepBatch, data: st.DataObject
) -> None:
    """Any rows of a step, each verifying any number of the drafts that the step before stored to its slot."""
    k = batch.num_draft_tokens
    slot_ids = data.draw(st.permutations(range(64)))[: len(batch.requests)]
    rows, slots = [], make_slots(ROOMY)
    is_chained = [data.draw(st.booleans()) for _ in batch.requests]
    for row, chained in zip(batch.requests, is_chained, strict=True):
        num_candidates = data.draw(st.integers(0, k)) if chained else row.num_candidates
        tokens = row.token_ids if not chained else tuple(range(500, 501 + num_candidates))
        pages = tuple(range(-(-(row.context_len + len(tokens)) // 4)))
        rows.append(replace(row, token_ids=tokens, num_candidates=num_candidates, page_ids=pages))
    written_out = StepBatch(requests=tuple(rows), num_draft_tokens=k)
    given = plan_of(written_out)
    updates = replace(given.page_updates, slots=np.array(slot_ids)[given.page_updates.slots])
    chained_rows = np.array(is_chained)
    rows_with_slots = replace(
        given.rows,
        slot_ids=np.array(slot_ids),
        context_lens=np.where(chained_rows, CHAINED, given.rows.context_lens),
        token_ids=np.where(np.repeat(chained_rows, given.rows.num_tokens), 0, given.rows.token_ids),
    )
    plan = replace(given, rows=rows_with_slots, page_updates=updates)
    slots.store(
        torch.tensor(slot_ids),
        torch.full((len(rows),), 500, dtype=torch.int32),
        _proposal(len(rows), k) if k else None,
        torch.tensor([row.context_len for row in rows], dtype=torch.int32),
    )
    found = HostInputs(ROOMY).assemble(plan, exact_shape(plan), slots)
    assert same(found, reference_inputs(written_out))
    if k:
        stored, is_drawn = _proposal(len(rows), k), torch.tensor(is_chained)[:, None]
        assert torch.equal(found.draft_topk_ids, stored.draft_topk_ids)
        assert torch.equal(
            found.draft_topk_probs, stored.draft_topk_probs * is_drawn
        )  # the host's drafts were not drawn


@pytest.mark.skipif(not isinstance(KERNELS, CpuKernels), reason=f"no CPU kernels: {KERNELS}")
def test_greedy_drafts_are_stored_as_pytorch_stores_them() -> None:
    slot_ids, k = torch.tensor([5, 0, 63]), 3
    bonus, lens = torch.tensor([7, 8, 9], dtype=torch.int32), torch.tensor([1, 30, 0], dtype=torch.int32)
    both = [make(ROOMY) for make in SLOTS.values()]
    for slots in both:
        slots.store(slot_ids, bonus, Proposal(tokens=_proposal(3, k).tokens), lens)
        slots.store(slot_ids[:1], bonus[1:2], None, lens[1:2])
    assert all(torch.equal(*pair) for pair in zip(*(slots.tensors for slots in both), strict=True))
    assert both[0].token_ids[5].tolist() == [8, 501, 502, 503, 0]


def _proposal(num_requests: int, k: int) -> Proposal[torch.Tensor]:
    """Drafts 501, 502, ..., and candidates that differ from request to request."""
    numbers = torch.arange(num_requests * k * 3).view(num_requests, -1)
    tokens = (501 + torch.arange(k, dtype=torch.int32)).repeat(num_requests, 1)
    return Proposal(tokens=tokens, draft_topk_ids=numbers.int(), draft_topk_probs=1 / (1 + numbers))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6))
def test_rows_that_repeat_are_padded_to_whatever_size_is_next(steps: list[tuple[int, int]]) -> None:
    """The rows are packed and sent once only while nothing of them changes."""
    limits = replace(LIMITS, max_batch_size=6, max_num_tokens=24)
    blocks = [replace(VERIFY, token_ids=(1, 2, 3, 4), num_candidates=3, page_ids=(4, 5, 6)) for _ in range(3)]
    plans = [plan_of(StepBatch(requests=tuple(blocks[:count]), num_draft_tokens=3)) for count in (3, 2)]
    staging = InputStaging(limits, torch.device("cpu"))
    for which, num_padding in steps:
        plan = plans[which]
        shape = decode_shape(plan.rows.num_requests + num_padding, 3)
        fresh = InputStaging(limits, torch.device("cpu"))
        for each in (staging, fresh):
            each.stage(plan, shape)
            each.upload()
            each.assemble(shape)
        found, expected = staging.inputs(shape), fresh.inputs(shape)
        real = slice(0, plan.rows.num_requests)  # pages of padding are those of any request
        assert torch.equal(found.page_table[real], expected.page_table[real])
        assert same(replace(found, page_table=expected.page_table), expected)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a_step_that_was_asked_for_no_drafts_gives_none(num_drafts: int) -> None:
    """TensorRT's steps make one at least."""
    staging, shape = ResultStaging(LIMITS, torch.device("cpu")), decode_shape(2, max(num_drafts, 1))
    result = staging.download(shape, num_requests=1, has_drafts=num_drafts > 0).read()
    assert result.draft_tokens.shape == (1, num_drafts)
    assert result.emitted_tokens.shape == (1, shape.width)


def test_a_batch_of_blocks_is_padded_as_far_as_the_token_limit_allows() -> None:
    blocks = (replace(VERIFY, num_candidates=2),) * 3
    limits = replace(LIMITS, max_batch_size=8, max_num_tokens=12)
    plan = plan_of(StepBatch(requests=blocks, num_draft_tokens=2))
    assert verify_block_shape(plan, limits) == decode_shape(4, 2)
    assert verify_block_shape(plan, replace(limits, max_num_tokens=11)) == decode_shape(3, 2)
    wider = replace(plan, rows=replace(plan.rows, num_draft_tokens=3))
    assert verify_block_shape(wider, limits) == decode_shape(3, 3)  # whose blocks are not full
    few_tokens = replace(limits, max_num_tokens=11)
    assert verify_block_shape(wider, few_tokens) == exact_shape(wider)


def test_ranks_with_requests_of_their_own_have_one_shape() -> None:
    """A TensorRT network exchanges as many rows of each rank."""
    limits = replace(LIMITS, max_batch_size=8, max_num_tokens=64)
    blocks, none = (
        plan_of(StepBatch(requests=(replace(VERIFY, num_candidates=2),) * n, num_draft_tokens=2)) for n in (3, 0)
    )
    alike = JointRows.of([blocks, none])
    assert {verify_block_shape(replace(plan, joint=alike), limits) for plan in (blocks, none)} == {decode_shape(4, 2)}
    prompt = plan_of(StepBatch(requests=(replace(PREFILL, token_ids=(1,) * 20),), num_draft_tokens=2))
    joint = JointRows.of([blocks, none, prompt])
    shapes = [verify_block_shape(replace(plan, joint=joint), limits) for plan in (blocks, none, prompt)]
    assert {(shape.num_requests, shape.num_tokens, shape.is_decode, shape.has_graph) for shape in shapes} == {
        (3, 20, False, False)
    }


def test_every_step_input_comes_from_the_plan_or_is_assembled() -> None:
    names = {item.name for item in fields(StepInputs)}
    assert names == {tensor.name for tensor in STEP_INPUTS}
    assert {tensor.name for tensor in PLAN_INPUTS} | set(ASSEMBLED) == names | {"slot_ids", "token_rows"}
