"""How the kernel of `block_conv.py` is launched. Allocates its output only."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.block_conv import block_conv_kernel
from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.tensor_checks import check, check_tensor

MAX_BLOCK: Final = 1024  # channels of a program
CONV_WARPS: Final = 4
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


def block_conv(
    x: Tensor,  # F [R*S, H]
    filters: Tensor,  # F [R*S, J * groups]; rows may be further apart
    base: Tensor,  # F [1, J, H]
    *,
    num_slots: int,  # S
) -> Tensor:
    """See `Ops.block_conv`; one launch."""
    num_rows, hidden_size = x.shape
    num_taps = base.shape[1]
    check_tensor("x", x, dtype=FLOATS, shape=[None, None])
    check_tensor(
        "filters", filters, dtype=x.dtype, shape=[num_rows, None], row_stride_is_free=True, may_be_unaligned=True
    )
    check_tensor("base", base, dtype=x.dtype, shape=[1, None, hidden_size])
    num_groups, uneven = divmod(filters.shape[1], num_taps)
    is_even = num_rows % num_slots == 0 and not uneven and num_groups > 0 and hidden_size % num_groups == 0
    expected = f"whole blocks of {num_slots} slots, and {num_taps} filters for each group of {hidden_size} channels"
    check(is_even, "filters", expected=expected, found=list(filters.shape), hint="See `Ops.block_conv`.")
    out = torch.empty_like(x)
    constants = block_conv_constants(hidden_size, num_groups=num_groups, num_taps=num_taps)
    block_conv_kernel[(num_rows, -(-hidden_size // constants["BLOCK"]))](
        x,
        filters,
        base,
        out,
        filters.stride(0),
        num_slots,
        hidden_size,
        **constants,
        num_warps=CONV_WARPS,
        enable_fp_fusion=True,
    )
    return out


def block_conv_constants(hidden_size: int, *, num_groups: int, num_taps: int) -> dict[str, int]:
    block = min(MAX_BLOCK, next_power_of_2(hidden_size))
    return {"GROUP_SIZE": hidden_size // num_groups, "TAPS": num_taps, "BLOCK": block}
