"""The kernel that turns acceptance results into the inputs of the draft block, without the host.

Launching is in `sampling_launch.py`.
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
