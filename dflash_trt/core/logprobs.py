"""Log probabilities besides the emitted tokens': of the most likely tokens, and of prompt tokens.

All are from the target's raw distribution: before temperature, filters, penalties, bias and masks. Steps give arrays,
which readers turn into tuples in their own threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from dflash_trt.core.array import Array

# Rows of logits that are read at a time: with PyTorch alone 0.16 GB in float32 for 150,000 tokens, and 0.3 GB as keys.
LOGPROBS_ROWS: Final = 256


class TokenLogprob(NamedTuple):
    """A token that the target could have given, and its log probability."""

    token_id: int
    logprob: float


class PromptLogprob(NamedTuple):
    """A prompt token, its log probability given the tokens before it, and the most likely tokens there."""

    token_id: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True, eq=False)
class TopTokens:
    """The N most likely tokens of each row of logits, the most likely first, ties by smaller token id.

    N is smaller than the plan's where the vocabulary is.
    """

    token_ids: Array  # int32 [..., N]
    logprobs: Array  # float32 [..., N]

    @classmethod
    def zeros(cls, *shape: int) -> TopTokens:
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.float32))

    @classmethod
    def of(cls, rows: Iterable[Sequence[TokenLogprob]]) -> TopTokens:
        """Rows of tokens, as many in each."""
        entries = [[*row] for row in rows]
        return cls(
            np.array([[entry.token_id for entry in row] for row in entries], np.int32),
            np.array([[entry.logprob for entry in row] for row in entries], np.float32),
        )

    def __getitem__(self, index: Any) -> TopTokens:
        return TopTokens(self.token_ids[index], self.logprobs[index])

    def put(self, index: Any, part: TopTokens) -> None:
        """Overwrite the rows at `index`; all get the N of `part`."""
        num_top = part.token_ids.shape[-1]
        self.token_ids, self.logprobs = self.token_ids[..., :num_top], self.logprobs[..., :num_top]
        self.token_ids[index], self.logprobs[index] = part.token_ids, part.logprobs

    def tuples(self) -> tuple[tuple[TokenLogprob, ...], ...]:
        """One tuple for each of the rows [M, N]."""
        return tuple(
            tuple(map(TokenLogprob, *row)) for row in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopRows:
    """Requests of a step that want the most likely tokens at each of their rows of logits."""

    requests: Array  # int64 [G], indices of the step's requests, ascending
    num_top_logprobs: int  # the largest number that any of them wants

    @classmethod
    def first(cls) -> TopRows:
        """The first request of a step: for trying."""
        return cls(requests=np.zeros(1, np.int64), num_top_logprobs=1)

    @classmethod
    def of(cls, num_top_logprobs: Array) -> TopRows | None:
        """By the number that each request of a step wants, int64 [R]; None if none wants any."""
        requests = np.flatnonzero(num_top_logprobs)
        return cls(requests=requests, num_top_logprobs=int(num_top_logprobs.max())) if len(requests) else None

    def part(self, part: slice) -> TopRows | None:
        """Those of the step's requests `part`, counted from its start; None if there are none."""
        requests = self.requests[(self.requests >= part.start) & (self.requests < part.stop)] - part.start
        return TopRows(requests=requests, num_top_logprobs=self.num_top_logprobs) if len(requests) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptRows:
    """Tokens of a step's prompt chunks after which the prompt goes on, in their order: M of them."""

    token_rows: Array  # int64 [M], indices into the tokens of the step, ascending
    next_tokens: Array  # int64 [M], the prompt's token after each
    num_top_logprobs: int  # the largest number that any of them wants

    @classmethod
    def first(cls) -> PromptRows:
        """The first token of a step, and any after it: for trying."""
        return cls(token_rows=np.zeros(1, np.int64), next_tokens=np.zeros(1, np.int64), num_top_logprobs=1)

    def between(self, start: int, stop: int) -> slice:
        """The entries of the step's tokens `start` to `stop`."""
        first, last = np.searchsorted(self.token_rows, (start, stop)).tolist()
        return slice(first, last)

    def part(self, start: int, stop: int) -> PromptRows | None:
        """Those of the step's tokens `start` to `stop`, counted from `start`; None if there are none."""
        entries = self.between(start, stop)
        if entries.start == entries.stop:
            return None
        return PromptRows(
            token_rows=self.token_rows[entries] - start,
            next_tokens=self.next_tokens[entries],
            num_top_logprobs=self.num_top_logprobs,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """A step's results for its PromptRows."""

    logprobs: Array  # float32 [M], of next_tokens
    top: TopTokens  # [M, N]

    @classmethod
    def of(cls, logprobs: Sequence[float], rows: Iterable[Sequence[TokenLogprob]]) -> PromptScores:
        """`rows` have the most likely tokens, as many in each."""
        return cls(np.array(logprobs, np.float32), TopTokens.of(rows))

    @classmethod
    def zeros(cls, num_rows: int, num_top_logprobs: int) -> PromptScores:
        return cls(np.zeros(num_rows, np.float32), TopTokens.zeros(num_rows, num_top_logprobs))

    def __getitem__(self, index: Any) -> PromptScores:
        return PromptScores(self.logprobs[index], self.top[index])

    def put(self, index: Any, part: PromptScores) -> None:
        """Overwrite the entries at `index`."""
        self.logprobs[index] = part.logprobs
        self.top.put(index, part.top)

    def entries(self, prompt_token_ids: tuple[int, ...]) -> tuple[PromptLogprob | None, ...]:
        """One for each token of a whole prompt; None for the first, before which there is nothing."""
        scored = zip(prompt_token_ids[1:], self.logprobs.tolist(), self.top.tuples(), strict=True)
        return (None, *(PromptLogprob(*entry) for entry in scored))
