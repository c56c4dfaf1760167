"""Verify blocks for rejection sampling, from a drafter that is nearly the target."""

from dataclasses import replace

import torch
from torch import Tensor

from dflash_trt.backends.torch.rejection import sample_topk
from dflash_trt.kernels.sampling_launch import SamplingInputs


def with_rejection_sampling(
    inputs: SamplingInputs,
    logits: Tensor,  # F [R*(K+1), V], of the target
    *,
    draft_topk: int,
    error: float = 0.5,  # of the drafter's logits
    draft_stream: Tensor | None = None,  # int32 [R], 1 of requests that sample by default
) -> SamplingInputs:
    """Every row has a draft, in the place of the token behind it."""
    num_requests, width = inputs.logit_rows.shape
    generator = torch.Generator().manual_seed(17)
    guesses = logits.float() + error * torch.randn(logits.shape, generator=generator)

    def per_row(values: Tensor) -> Tensor:
        return values.repeat_interleave(width)

    rows = inputs.logit_rows.flatten().long()
    temperature = per_row(inputs.temperature)
    drafts, draft_topk_ids, draft_topk_probs = sample_topk(
        logits=guesses,
        seed=per_row(inputs.seed),
        position=inputs.positions[rows].long() + 1,
        temperature=torch.where(temperature > 0, temperature, 1.0),
        draft_to_target=None,
        draft_topk=draft_topk,
    )
    token_ids = inputs.token_ids.clone()
    is_draft = (torch.arange(width) < inputs.num_candidates[:, None]).flatten()
    token_ids[rows[is_draft] + 1] = drafts[is_draft].int()

    def of_drafts(values: Tensor) -> Tensor:  # [R*(K+1), C] -> [R, K*C]
        return values.view(num_requests, width, -1)[:, :-1].flatten(1).contiguous()

    stream = (inputs.temperature > 0).int() if draft_stream is None else draft_stream
    columns = {
        "draft_topk_ids": of_drafts(draft_topk_ids).int(),
        "draft_topk_probs": of_drafts(draft_topk_probs),
        "draft_stream": stream,
    }
    return replace(inputs, token_ids=token_ids, **columns)
