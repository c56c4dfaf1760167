"""Log probabilities of a prompt, chunk by chunk."""

import numpy as np
import pytest

from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.scheduler.prompt_logprobs import PromptLogprobs


def scores(start: int, stop: int) -> PromptScores:
    """Of as many tokens, each with its position."""
    positions = np.arange(start, stop)
    return PromptScores(positions.astype(np.float32), TopTokens(positions[:, None], positions[:, None] / 2))


@pytest.mark.parametrize("computed_before", [[], [(0, 3)], [(0, 3), (3, 5)]])
def test_a_prompt_that_begins_again_is_told_once(computed_before: list[tuple[int, int]]) -> None:
    collected = PromptLogprobs(range(8), 1)
    for chunk in (*computed_before, (0, 4), (4, 7)):
        assert collected.delivered() is None
        collected.add_scores(chunk[0], scores(*chunk))
    delivered = collected.delivered()
    assert delivered is not None and delivered.logprobs.tolist() == list(range(7))
    assert delivered.top.token_ids[:, 0].tolist() == list(range(7))
    assert collected.is_complete and collected.delivered() is None
