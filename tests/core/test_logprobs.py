"""Log probabilities beside those of the emitted tokens: arrays that are put together, and read as tuples."""

import numpy as np

from dflash_trt.core.logprobs import PromptLogprob, PromptRows, PromptScores, TokenLogprob, TopTokens


def top_tokens(*shape: int) -> TopTokens:
    token_ids = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return TopTokens(token_ids, -token_ids.astype(np.float32) / 2)


def test_a_prompt_has_an_entry_for_each_token_and_none_for_the_first() -> None:
    scores = PromptScores(np.array([-0.5, -0.25], np.float32), top_tokens(2, 2))
    assert scores.entries((7, 8, 9)) == (
        None,
        PromptLogprob(8, -0.5, (TokenLogprob(0, 0.0), TokenLogprob(1, -0.5))),
        PromptLogprob(9, -0.25, (TokenLogprob(2, -1.0), TokenLogprob(3, -1.5))),
    )
    assert PromptScores.zeros(0, 3).entries((7,)) == (None,)


def test_parts_that_have_fewer_alternatives_narrow_the_whole() -> None:
    """Those of a small vocabulary."""
    whole = PromptScores.zeros(5, 4)
    whole.put(slice(1, 3), PromptScores(np.array([-1.0, -2.0], np.float32), top_tokens(2, 3)))
    assert whole.logprobs.tolist() == [0.0, -1.0, -2.0, 0.0, 0.0]
    assert whole.top.token_ids.tolist() == [[0] * 3, [0, 1, 2], [3, 4, 5], [0] * 3, [0] * 3]
    assert whole.top.logprobs[1:3].tolist() == [[0.0, -0.5, -1.0], [-1.5, -2.0, -2.5]]
    part = whole[1:3]
    assert part.logprobs.tolist() == [-1.0, -2.0] and part.top.token_ids.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_rows_of_a_part_count_from_its_first_token() -> None:
    rows = PromptRows(token_rows=np.array([2, 3, 7]), next_tokens=np.array([20, 30, 70]), num_top_logprobs=5)
    assert [rows.between(*span) for span in ((0, 2), (2, 4), (3, 8), (8, 9))] == [
        slice(0, 0),
        slice(0, 2),
        slice(1, 3),
        slice(3, 3),
    ]
    part = rows.part(3, 8)
    assert part is not None and part.num_top_logprobs == 5
    assert (part.token_rows.tolist(), part.next_tokens.tolist()) == ([0, 4], [30, 70])
    assert rows.part(4, 7) is None
