"""Log probabilities of prompts: which tokens of a step want them, and what its requests have got so far."""

import numpy as np

from dflash_trt.core.logprobs import PromptRows, PromptScores, TopTokens
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import Array, StepPlan, StepResult
from dflash_trt.scheduler.sequence import Sequence


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
    def of(cls, request: Request) -> "PromptBook | None":
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


def prompt_rows(
    sequences: list[Sequence], token_ids: list[Array], *, starts: list[int], first_token_row: int
) -> PromptRows | None:
    """The tokens of chunks that log probabilities are wanted after; None for most steps.

    `token_ids` are those of each chunk, one behind another in the step from `first_token_row` on.
    """
    rows, next_tokens, num_top_logprobs = [], [], 0
    for sequence, chunk, start in zip(sequences, token_ids, starts, strict=True):
        book = sequence.prompt_book
        num_wanted = 0 if book is None else book.num_wanted(start, len(chunk))
        if book is not None and num_wanted:
            rows.append(np.arange(first_token_row, first_token_row + num_wanted))
            next_tokens.append(np.array(sequence.request.prompt_token_ids[start + 1 : start + 1 + num_wanted]))
            num_top_logprobs = max(num_top_logprobs, book.num_top_logprobs)
        first_token_row += len(chunk)
    if not rows:
        return None
    return PromptRows(
        token_rows=np.concatenate(rows), next_tokens=np.concatenate(next_tokens), num_top_logprobs=num_top_logprobs
    )


def take_prompt_scores(plan: StepPlan, sequences: list[Sequence], result: StepResult) -> None:
    """Enter a step's scores into the books; those of a request that was preempted meanwhile are as good."""
    if plan.prompt_rows is None:
        return
    assert result.prompt is not None, "the step was to give log probabilities of prompts"
    offsets, starts = plan.rows.token_offsets.tolist(), plan.rows.context_lens.tolist()
    for row, sequence in enumerate(sequences):
        entries = plan.prompt_rows.between(offsets[row], offsets[row + 1])
        if entries.start < entries.stop and sequence.prompt_book is not None and sequence.finish_reason is None:
            sequence.prompt_book.take(starts[row], result.prompt[entries])
