"""Log probabilities of a prompt, chunk by chunk."""

import numpy as np
import pytest

from dflash_trt.core.logprobs import PromptScores, TopTokens
from dflash_trt.scheduler.prompt_logprobs import PromptLogprobs
from dflash_trt.scheduler.scheduler import Scheduler
from tests.scheduler.driver import make_limits, make_request


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


def test_all_prompts_of_a_step_share_the_scores_that_an_executor_gives() -> None:
    """Others use the tokens that are left; the last chunk of a prompt ends with a token that needs no score."""
    scheduler = Scheduler(make_limits(max_num_tokens=24, max_prompt_scores=7))
    for name, fields in (("a", {"prompt_logprobs": 0}), ("b", {"prompt_logprobs": 0}), ("c", {})):
        scheduler.add(make_request(name, range(6), **fields))
    plan = scheduler.plan().plan
    assert plan.rows.num_tokens.tolist() == [6, 2, 6]
    assert plan.prompt_rows is not None and len(plan.prompt_rows.token_rows) == 5 + 2
