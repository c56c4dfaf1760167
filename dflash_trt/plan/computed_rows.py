"""The rows of a step, as what it moves and computes depends on them."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from dflash_trt.core.array import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class ComputedRows:
    """By request; int64. Every request gets K drafts, one that decodes has at most K + 1 tokens."""

    num_tokens: Array  # [R]
    context_lens: Array  # [R], before the step
    num_draft_tokens: int  # K

    @classmethod
    def decode(cls, *, num_requests: int, context_len: int, num_draft_tokens: int) -> Self:
        """Verify blocks of requests that are alike."""
        return cls(
            num_tokens=np.full(num_requests, num_draft_tokens + 1),
            context_lens=np.full(num_requests, context_len),
            num_draft_tokens=num_draft_tokens,
        )

    @property
    def num_requests(self) -> int:
        return len(self.num_tokens)
