"""How the kernels of `paged_rows.py` are launched. Nothing here reads a tensor's content."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.launching import check, check_tensor, next_power_of_2, request_capacity
from dflash_trt.kernels.paged_rows import last_rows_kernel, previous_rows_kernel

MAX_BLOCK: Final = 1024  # columns of a program
ROW_WARPS: Final = 4


def previous_rows(
    x: Tensor,  # F [T, W]
    pages: Tensor,  # F [pages, page_size, W], written
    requests: RequestTensors,  # context_lens: tokens before this step
    positions: Tensor,  # int32 [T]
) -> Tensor:  # F [T, W]
    """See `Ops.previous_rows`; rows after the last request's get zeros and do not touch pages."""
    (num_rows, width), num_requests = x.shape, len(requests.page_table)
    page_shift = _check(pages, requests.page_table, dtype=x.dtype, width=width)
    check_tensor("x", x, dtype=pages.dtype, shape=[None, None])
    check_tensor("positions", positions, dtype=torch.int32, shape=[num_rows])
    requests.check(num_requests, "token_offsets", "context_lens")
    before = torch.empty_like(x)
    block = row_block(width)
    previous_rows_kernel[(num_rows, -(-width // block))](
        x,
        before,
        pages,
        requests.page_table,  # not read: pages are given
        positions,
        requests.token_offsets,
        requests.context_lens,
        requests.page_table,
        width,
        num_requests,
        requests.page_table.shape[1],
        page_shift,
        0,
        REQUESTS=request_capacity(num_requests),
        BLOCK=block,
        POOLED=False,
        num_warps=ROW_WARPS,
        enable_fp_fusion=True,
    )
    return before


def last_rows(
    pages: Tensor,  # F [pages, page_size, W]
    page_table: Tensor,  # int32 [R, P]
    lengths: Tensor,  # int32 [R]
) -> Tensor:  # F [R, W]
    """The rows at lengths - 1; zeros for a request of no length."""
    num_requests, width = len(page_table), pages.shape[2]
    page_shift = _check(pages, page_table, dtype=pages.dtype, width=width)
    check_tensor("lengths", lengths, dtype=torch.int32, shape=[num_requests])
    rows = torch.empty((num_requests, width), dtype=pages.dtype, device=pages.device)
    block = row_block(width)
    last_rows_kernel[(num_requests, -(-width // block))](
        pages,
        lengths,
        page_table,
        rows,
        width,
        page_table.shape[1],
        page_shift,
        BLOCK=block,
        num_warps=ROW_WARPS,
        enable_fp_fusion=True,
    )
    return rows


def row_block(width: int) -> int:
    return min(MAX_BLOCK, next_power_of_2(width))


def _check(pages: Tensor, page_table: Tensor, *, dtype: torch.dtype, width: int) -> int:
    """The shift of a page's size."""
    check_tensor("pages", pages, dtype=dtype, shape=[None, None, width])
    check_tensor("page_table", page_table, dtype=torch.int32, shape=[None, None])
    page_size = pages.shape[1]
    is_power = page_size & (page_size - 1) == 0
    check(is_power, "page_size", expected="a power of two", found=page_size, hint="Build with 16, 32 or 64.")
    return page_size.bit_length() - 1
