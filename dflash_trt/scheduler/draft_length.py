"""How many drafts each request gets in a step.

K = 0 is plain decoding; the draft context stays fed, so drafting can resume at any step.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObservation:
    """What a step turned out to be. `verified` has (num_candidates, num_accepted) of each verify block."""

    num_draft_tokens: int
    num_decoding: int  # requests that decoded
    num_prefill_tokens: int  # tokens of chunks longer than one
    verified: tuple[tuple[int, int], ...]
    elapsed_s: float | None  # None: not measured


class DraftLengthPolicy(Protocol):
    """Chooses K before a step and hears of it afterwards."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every K that it may choose; a GPU prepares them when an engine is opened."""
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
    """K by the number of decoding requests: `{1: 7, 8: 3, 32: 0}` reads "from 8 requests on, 3 drafts"."""

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
        self._batch_sizes = sorted(lengths)
        self._lengths = [lengths[batch_size] for batch_size in self._batch_sizes]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted(set(self._lengths)))

    def choose(self, num_decoding: int) -> int:
        return self._lengths[bisect_right(self._batch_sizes, max(1, num_decoding)) - 1]

    def observe(self, step: StepObservation) -> None:
        """Nothing to learn."""


def _check_length(subject: str, length: int) -> None:
    if length < 0:
        raise ConfigError.about(
            subject, expected="0 or more drafts", found=str(length), hint="Pass 0 to decode without drafting."
        )
