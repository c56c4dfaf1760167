"""The convolution over the slots of a draft block; `backends/torch/dflash2.py` defines it.

In float32, rounded once, when stored. Launching is in `block_conv_launch.py`.
"""

# mypy: ignore-errors
# ruff: noqa: N803  (functions of the Triton language: no types but constexpr, whose names are in capitals)

import triton
import triton.language as tl


# The filters of one side of a sublayer begin anywhere in a row of both.
@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["filters"])
def block_conv_kernel(
    x,  # F [R * num_slots, hidden_size]
    filters,  # F, R * num_slots rows of [TAPS, groups], filter_stride apart
    base,  # F [TAPS, hidden_size]
    out,  # F [R * num_slots, hidden_size]
    filter_stride,
    num_slots,
    hidden_size,
    GROUP_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R * num_slots, ceil(hidden_size / BLOCK))."""
    row = tl.program_id(0)
    slot = row % num_slots
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = channels < hidden_size
    own_filters = filters + row.to(tl.int64) * filter_stride + channels // GROUP_SIZE
    own_row = x + row.to(tl.int64) * hidden_size + channels
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        if tap <= slot:  # zeros stand before slot 0
            coefficient = tl.load(base + tap * hidden_size + channels, mask=is_in, other=0.0).to(tl.float32)
            group = own_filters + tap * (hidden_size // GROUP_SIZE)
            coefficient += tl.load(group, mask=is_in, other=0.0).to(tl.float32)
            total += coefficient * tl.load(own_row - tap * hidden_size, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * hidden_size + channels, total.to(out.dtype.element_ty), mask=is_in)
