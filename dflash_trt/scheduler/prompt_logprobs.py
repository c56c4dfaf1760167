"""Log probabilities of prompts: which rows of a step compute them, and what is collected for each request."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.logprobs import PromptRows, PromptScores, TopTokens
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import StepPlan, StepResult


class PromptLogprobs:
    """The log probabilities of one prompt, chunk by chunk.

    Only computing a prompt gives them, so a request uses no cached prefix until they are complete. Preempted
    before, it begins again.
    """

    def __init__(self, prompt_token_ids: Sequence[int], num_top_logprobs: int) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.num_top_logprobs = num_top_logprobs
        self._num_missing = len(prompt_token_ids) - 1  # nothing stands before the first token
        self._num_all = self._num_missing
        self._parts: list[PromptScores] = []
        self._is_delivered = False

    @classmethod
    def of(cls, request: Request) -> Self | None:
        num_top_logprobs = request.sampling.prompt_logprobs
        return None if num_top_logprobs is None else cls(request.prompt_token_ids, num_top_logprobs)

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    def num_wanted(self, start: int, num_tokens: int) -> int:
        """Number of tokens in a chunk that a prompt token follows; the chunk may end with emitted tokens."""
        return 0 if self.is_complete else max(0, min(num_tokens, self._num_all - start))

    def add_scores(self, start: int, scores: PromptScores) -> None:
        """Add the entries of a chunk at position `start`."""
        if start == 0:
            self._parts, self._num_missing = [], self._num_all
        assert start == self._num_all - self._num_missing, "chunks come in their order"
        self._parts.append(scores)
        self._num_missing -= len(scores.logprobs)

    def delivered(self) -> PromptScores | None:
        """All log probabilities, once, when they are complete."""
        if self._is_delivered or not self.is_complete:
            return None
        self._is_delivered = True
        parts, self._parts = self._parts or [PromptScores.zeros(0, self.num_top_logprobs)], []
        token_ids, top_logprobs = (
            np.concatenate([array[:, : self.num_top_logprobs] for array in arrays])
            for arrays in ([part.top.token_ids for part in parts], [part.top.logprobs for part in parts])
        )
        return PromptScores(np.concatenate([part.logprobs for part in parts]), TopTokens(token_ids, top_logprobs))


def prompt_rows(
    wanting: Sequence[PromptLogprobs | None], token_ids: Sequence[Array], *, starts: Sequence[int], first_token_row: int
) -> PromptRows | None:
    """Rows of the chunks that need log probabilities of prompts; None for most steps.

    `wanting` has each chunk's collector, if its request wants them; `token_ids` are the chunks' tokens, which the step
    concatenates from `first_token_row` on.
    """
    rows, next_tokens, num_top_logprobs = [], [], 0
    for collected, chunk, start in zip(wanting, token_ids, starts, strict=True):
        num_wanted = 0 if collected is None else collected.num_wanted(start, len(chunk))
        if collected is not None and num_wanted:
            rows.append(np.arange(first_token_row, first_token_row + num_wanted))
            next_tokens.append(np.array(collected.prompt_token_ids[start + 1 : start + 1 + num_wanted]))
            num_top_logprobs = max(num_top_logprobs, collected.num_top_logprobs)
        first_token_row += len(chunk)
    if not rows:
        return None
    return PromptRows(
        token_rows=np.concatenate(rows), next_tokens=np.concatenate(next_tokens), num_top_logprobs=num_top_logprobs
    )


def collect_prompt_logprobs(plan: StepPlan, wanting: Sequence[PromptLogprobs | None], result: StepResult) -> None:
    """Record a step's prompt log probabilities by row; a request that was preempted since keeps them."""
    assert plan.prompt_rows is not None and result.prompt is not None
    offsets, starts = plan.rows.token_offsets.tolist(), plan.rows.context_lens.tolist()
    for row, collected in enumerate(wanting):
        entries = plan.prompt_rows.between(offsets[row], offsets[row + 1])
        if collected is not None and entries.start < entries.stop:
            collected.add_scores(starts[row], result.prompt[entries])
