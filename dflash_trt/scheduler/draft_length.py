"""Policies that choose K, the drafts per request of a step.

K = 0 decodes autoregressively; the draft context is kept up to date, so that drafting can resume at any step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Protocol

from dflash_trt.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObservation:
    """Measurements of a step. `verified` has (num_candidates, num_accepted) of each verify block."""

    num_draft_tokens: int
    num_decoding: int  # requests that decoded
    num_prefill_tokens: int  # tokens of chunks longer than one
    verified: tuple[tuple[int, int], ...]
    elapsed_s: float | None  # None: not measured


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


class FixedDraftLength:
    """The same K in every step."""

    def __init__(self, num_draft_tokens: int) -> None:
        _check_length("num_draft_tokens", num_draft_tokens)
        self._num_draft_tokens = num_draft_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._num_draft_tokens,)

    def choose(self, num_decoding: int) -> int:
        return self._num_draft_tokens

    def observe(self, step: StepObservation) -> None:
        """Nothing to learn."""


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
            _check_length(f"draft length at batch size {batch_size}", length)
        self.lengths = tuple(sorted(set(lengths.values())))
        self._table = lengths

    def choose(self, num_decoding: int) -> int:
        length = _at(self._table, max(1, num_decoding))
        assert length is not None, "the table begins at 1"
        return length

    def observe(self, step: StepObservation) -> None:
        """Nothing to learn."""


class ContextLimit:
    """A maximum of K by context length: `{32768: 3}` means at most 3 drafts from 32768 tokens on.

    The median of the decoding requests counts: K is a number of the step, so that one long context among short ones
    costs them no drafts, and one short context among long ones saves none. For policies that do not measure.
    """

    def __init__(self, lengths: Mapping[int, int]) -> None:
        self._table = lengths

    def apply(self, num_draft_tokens: int, context_lens: Iterable[int]) -> int:
        """K at most; `context_lens` are those of the requests that decode, and read if there is a table."""
        lens = list(context_lens) if self._table else []
        most = _at(self._table, median_low(lens)) if lens else None
        return num_draft_tokens if most is None else min(num_draft_tokens, most)


def _at(table: Mapping[int, int], size: int) -> int | None:
    """The length that holds at a size: that of the largest key up to it."""
    return table.get(max((key for key in table if key <= size), default=-1))


def _check_length(subject: str, length: int) -> None:
    if length < 0:
        raise ConfigError.about(subject, expected="0 (no drafting) or more drafts", found=str(length))
