"""What a request that wants log probabilities of its prompt has got so far."""

from typing import Self

import numpy as np

from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.core.request import Request


class PromptBook:
    """The log probabilities of one prompt, chunk by chunk.

    Only computing a prompt gives them, so that a request takes no cached prefix until its book is complete. Preempted
    before, it begins again.
    """

    def __init__(self, num_prompt_tokens: int, num_top_logprobs: int) -> None:
        self.num_top_logprobs = num_top_logprobs
        self._num_missing = num_prompt_tokens - 1  # nothing stands before the first token
        self._num_all = self._num_missing
        self._parts: list[PromptScores] = []
        self._is_delivered = False

    @classmethod
    def of(cls, request: Request) -> Self | None:
        num_top_logprobs = request.sampling.prompt_logprobs
        return None if num_top_logprobs is None else cls(len(request.prompt_token_ids), num_top_logprobs)

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    def num_wanted(self, start: int, num_tokens: int) -> int:
        """Of a chunk of the prompt, and perhaps of emitted tokens behind it, the tokens that a prompt token follows."""
        return 0 if self.is_complete else max(0, min(num_tokens, self._num_all - start))

    def take(self, start: int, scores: PromptScores) -> None:
        """The entries of a chunk at position `start`."""
        if start == 0:
            self._parts, self._num_missing = [], self._num_all
        assert start == self._num_all - self._num_missing, "chunks come in their order"
        self._parts.append(scores)
        self._num_missing -= len(scores.logprobs)

    def delivered(self) -> PromptScores | None:
        """All of them, once, when they are complete."""
        if self._is_delivered or not self.is_complete:
            return None
        self._is_delivered = True
        parts, self._parts = self._parts or [PromptScores.zeros(0, self.num_top_logprobs)], []
        token_ids, top_logprobs = (
            np.concatenate([array[:, : self.num_top_logprobs] for array in arrays])
            for arrays in ([part.top.token_ids for part in parts], [part.top.logprobs for part in parts])
        )
        return PromptScores(np.concatenate([part.logprobs for part in parts]), TopTokens(token_ids, top_logprobs))
