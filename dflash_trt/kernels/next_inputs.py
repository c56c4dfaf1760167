"""Kernels that turn a step's results into inputs: of the draft block after acceptance, of the next step after drafting.

They are made on the device, so that neither waits for the host. Launching is in `sampling_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["mask_token_id", "width"])
def draft_block_kernel(
    bonus_tokens,  # int32 [R]
    next_context_lens,  # int32 [R]
    token_ids,  # int32 [R, width]: [bonus, MASK ..]
    positions,  # int32 [R, width]: from next_context_lens on
    mask_token_id,
    width,
    WIDTH: tl.constexpr,
):
    request = tl.program_id(0)
    slots = tl.arange(0, WIDTH)
    tokens = tl.where(slots == 0, tl.load(bonus_tokens + request), mask_token_id)
    tl.store(token_ids + request * width + slots, tokens, mask=slots < width)
    tl.store(positions + request * width + slots, tl.load(next_context_lens + request) + slots, mask=slots < width)


@triton.jit(do_not_specialize=["width"])
def advance_kernel(
    bonus_tokens,  # int32 [R]
    draft_tokens,  # int32 [R, width - 1]
    next_context_lens,  # int32 [R]
    token_ids,  # int32 [R, width]: [bonus, drafts], the next step's
    positions,  # int32 [R, width], the next step's
    context_lens,  # int32 [R], the next step's
    width,
    WIDTH: tl.constexpr,
):
    """Turn a decode step's results into the next one's inputs: every request verifies all its drafts."""
    request = tl.program_id(0)
    slots = tl.arange(0, WIDTH)
    start = tl.load(next_context_lens + request)
    is_draft = (slots > 0) & (slots < width)
    drafts = tl.load(draft_tokens + request * (width - 1) + slots - 1, mask=is_draft, other=0)
    tokens = tl.where(slots == 0, tl.load(bonus_tokens + request), drafts)
    tl.store(token_ids + request * width + slots, tokens, mask=slots < width)
    tl.store(positions + request * width + slots, start + slots, mask=slots < width)
    tl.store(context_lens + request, start)
