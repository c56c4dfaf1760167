"""Sizes that kernels are compiled for: one of a few for what is smaller."""

from typing import Final

from dflash_trt.kernels.tensor_checks import check

_CAPACITIES = (16, 64, 256, 1024, 4096)
MAX_REQUESTS = _CAPACITIES[-1]
MAX_DELTA_HEAD_DIM: Final = 128  # in gated delta nets
MAX_DELTA_RECORDS: Final = 64
MAX_CANDIDATES: Final = 64  # per slot of a draft block, and per draft


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def topk_capacity(draft_topk: int) -> int:
    """The constant DRAFT_TOPK: one of two sizes."""
    return 32 if draft_topk <= 32 else MAX_CANDIDATES


def request_capacity(num_requests: int) -> int:
    """The constant REQUESTS: one of a few sizes, so that few variants are compiled."""
    check(
        num_requests <= MAX_REQUESTS,
        "requests in a step",
        expected=f"at most {MAX_REQUESTS}",
        found=num_requests,
        hint="Build the engine with a smaller max_batch_size.",
    )
    return next(capacity for capacity in _CAPACITIES if capacity >= num_requests)
