"""Policies that choose K, the drafts per request of a step, and how many of them each request verifies.

K = 0 decodes autoregressively; the draft context is kept up to date, so that drafting can resume at any step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.array import Array
from dflash_trt.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObservation:
    """Measurements of a step with R requests that decoded.

    Arrays int64 [R]: `slots` and `epochs` name the requests, `num_accepted` drafts of `num_candidates` were accepted.
    """

    num_draft_tokens: int
    num_prefill_tokens: int  # tokens of chunks longer than one
    slots: Array
    epochs: Array
    num_candidates: Array
    num_accepted: Array
    elapsed_s: float | None  # None means not measured

    @property
    def num_decoding(self) -> int:
        return len(self.slots)


class DraftLengthPolicy(Protocol):
    """Chooses K before a step and observes the step afterwards.

    `lengths` are all K that it may choose, for which a GPU prepares when an engine is opened.
    """

    lengths: tuple[int, ...]

    @property
    def is_joint(self) -> bool:
        """True if K is that of other ranks, too, so that a step has it even if no request needs drafts."""
        return False

    @property
    def has_budget(self) -> bool:
        """True if `limit` may leave out drafts of the next step, or wants to know them."""
        return False

    def choose(self, num_decoding: int) -> int:
        """K for a step with `num_decoding` requests that decode; never negative."""
        ...

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        """Drafts that each request verifies, int64 [R]: at most `num_candidates`, which are there.

        `confidence` float64 [R, max_draft_len] are the drafter's, NaN where it has none. Asked of a policy with a
        budget.
        """
        return num_candidates

    def observe(self, step: StepObservation) -> None: ...


class BatchSizeDraftLength(DraftLengthPolicy):
    """K by the number of decoding requests: `{1: 7, 8: 3, 32: 0}` means 3 drafts for 8 to 31 requests."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        if 1 not in lengths or min(lengths) < 1:
            raise ConfigError.about(
                "draft length schedule",
                expected="batch sizes from 1 upwards",
                found=str(sorted(lengths)),
                hint="Start the schedule at batch size 1.",
            )
        for batch_size, length in lengths.items():
            if length < 0:
                subject, expected = f"draft length at batch size {batch_size}", "0 (no drafting) or more drafts"
                raise ConfigError.about(subject, expected=expected, found=str(length))
        self.lengths = tuple(sorted(set(lengths.values())))
        self._table = lengths

    def choose(self, num_decoding: int) -> int:
        return self._table[max(size for size in self._table if size <= max(1, num_decoding))]

    def observe(self, step: StepObservation) -> None:
        """Nothing to learn."""


class FixedDraftLength(BatchSizeDraftLength):
    """The same K in every step."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__({1: num_draft_tokens})
