"""Sizes that kernels are compiled for: one of a few for what is smaller."""

from typing import Final

from dflash_trt.kernels.tensor_checks import check

_CAPACITIES = (16, 64, 256, 1024, 4096)
MAX_REQUESTS = _CAPACITIES[-1]
MAX_DELTA_HEAD_DIM: Final = 128  # of gated delta nets
MAX_DELTA_RECORDS: Final = 64
MAX_CANDIDATES: Final = 64  # of a slot of a draft block, and choices of a draft


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def choice_capacity(num_choices: int) -> int:
    """The constant NUM_CHOICES: one of two sizes."""
    return 32 if num_choices <= 32 else MAX_CANDIDATES


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
