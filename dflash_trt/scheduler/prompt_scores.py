"""Log probabilities of prompts: which tokens of a step want them, and how its results come to the books."""

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.logprobs import PromptRows
from dflash_trt.core.step_plan import StepPlan, StepResult
from dflash_trt.scheduler.sequence import Sequence


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
        if entries.start < entries.stop and sequence.prompt_book is not None:
            sequence.prompt_book.take(starts[row], result.prompt[entries])
