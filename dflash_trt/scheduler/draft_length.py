"""Policies that choose K, the drafts per request of a step.

K = 0 decodes autoregressively; the draft context is kept up to date, so that drafting can resume at any step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObservation:
    """Measurements of a step. `verified` has (num_candidates, num_accepted) of each verify block."""

    num_draft_tokens: int
    num_decoding: int  # requests that decoded
    num_prefill_tokens: int  # tokens of chunks longer than one
    verified: tuple[tuple[int, int], ...]
    elapsed_s: float | None  # None means not measured


class DraftLengthPolicy(Protocol):
    """Chooses K before a step and observes the step afterwards."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """All K that it may choose, for which a GPU prepares when an engine is opened."""
        ...

    def choose(self, num_decoding: int) -> int:
        """K for a step with `num_decoding` requests that decode; never negative."""
        ...

    def observe(self, step: StepObservation) -> None: ...


class BatchSizeDraftLength:
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
