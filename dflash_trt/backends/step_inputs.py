"""A StepBatch as the input tensors of the step contract, and output tensors as a StepResult."""

from collections.abc import Sequence
from math import isnan

import torch
from torch import Tensor

from dflash_trt.core.batch import ExecutorLimits, RequestResult, ScheduledRequest, StepBatch, StepResult, StepSampling
from dflash_trt.network.ops import StepInputs
from dflash_trt.network.step import StepOutputs


def check_batch(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Assert what the scheduler guarantees."""
    assert 0 < len(batch.requests) <= limits.max_batch_size
    assert batch.num_tokens <= limits.max_num_tokens
    assert batch.num_draft_tokens <= limits.max_draft_len
    for request in batch.requests:
        end = request.context_len + len(request.token_ids)
        assert request.token_ids and end <= limits.max_seq_len
        assert end <= len(request.page_ids) * limits.page_size
        assert request.num_candidates <= min(batch.num_draft_tokens, len(request.token_ids) - 1)


def sequence_batch(token_ids: Sequence[int], *, page_size: int) -> StepBatch:
    """One whole sequence on the first pages, for measuring: it overwrites what is there."""
    request = ScheduledRequest(
        request_id="sequence",
        token_ids=tuple(token_ids),
        context_len=0,
        num_candidates=0,
        page_ids=tuple(range(-(-len(token_ids) // page_size))),
        sampling=StepSampling(),
    )
    return StepBatch(requests=(request,), num_draft_tokens=0)


def step_inputs(batch: StepBatch) -> StepInputs[Tensor]:
    """Pack the requests of a batch; shapes and dtypes as in `core/step_spec.STEP_INPUTS`."""
    requests, width = batch.requests, batch.num_draft_tokens + 1
    offsets = [0]
    positions: list[int] = []
    logit_rows: list[list[int]] = []
    for request in requests:
        start, num_tokens = offsets[-1], len(request.token_ids)
        positions.extend(range(request.context_len, request.context_len + num_tokens))
        last = start + num_tokens - 1
        first = last - request.num_candidates
        logit_rows.append([min(first + j, last) for j in range(width)])
        offsets.append(start + num_tokens)
    num_pages = max(len(request.page_ids) for request in requests)
    pages = [list(request.page_ids) + [0] * (num_pages - len(request.page_ids)) for request in requests]
    sampling = [request.sampling for request in requests]
    return StepInputs(
        token_ids=_int32([token for request in requests for token in request.token_ids]),
        positions=_int32(positions),
        token_offsets=_int32(offsets),
        context_lens=_int32([request.context_len for request in requests]),
        page_table=_int32(pages),
        logit_rows=_int32(logit_rows),
        num_candidates=_int32([request.num_candidates for request in requests]),
        temperature=torch.tensor([s.temperature for s in sampling], dtype=torch.float32),
        top_k=_int32([s.top_k for s in sampling]),
        top_p=torch.tensor([s.top_p for s in sampling], dtype=torch.float32),
        min_p=torch.tensor([s.min_p for s in sampling], dtype=torch.float32),
        seed=torch.tensor([s.seed for s in sampling], dtype=torch.int64),
    )


def step_result(outputs: StepOutputs[Tensor]) -> StepResult:
    """Bring the outputs to the host."""
    acceptance = outputs.acceptance
    num_accepted = acceptance.num_accepted.tolist()
    emitted = acceptance.emitted_tokens.tolist()
    logprobs = acceptance.emitted_logprobs.tolist()
    next_context_lens = acceptance.next_context_lens.tolist()
    drafts = [()] * len(emitted) if outputs.draft_tokens is None else outputs.draft_tokens.tolist()
    results = (
        RequestResult(
            emitted_tokens=tuple(emitted[r][: num_accepted[r] + 1]),
            logprobs=tuple(logprobs[r][: num_accepted[r] + 1]),
            num_accepted=num_accepted[r],
            draft_tokens=tuple(drafts[r]),
            next_context_len=next_context_lens[r],
        )
        for r in range(len(emitted))
    )
    return StepResult(requests=tuple(_up_to_non_finite(result) for result in results))


def _up_to_non_finite(result: RequestResult) -> RequestResult:
    """Translate the NaN of the step contract: what was emitted before the first row whose logits gave no token."""
    num_good = next((i for i, logprob in enumerate(result.logprobs) if isnan(logprob)), None)
    if num_good is None:
        return result
    next_context_len = result.next_context_len - result.num_accepted + num_good
    return RequestResult(
        emitted_tokens=result.emitted_tokens[:num_good],
        logprobs=result.logprobs[:num_good],
        num_accepted=num_good,
        draft_tokens=(),
        next_context_len=next_context_len,
        non_finite_position=next_context_len - 1,
    )


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
