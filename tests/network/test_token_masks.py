"""Masked rows of logits on a CPU: what may come does, in the target's proportions."""

import math

import numpy as np
import pytest
import torch

from dflash_trt.backends.torch.sampling import masked_scores, sample_and_accept
from dflash_trt.core.step_plan import TokenMasks
from tests.network.test_sample_and_accept import VOCAB_SIZE, WIDTH, step_inputs

ALLOWED = [1, 6, 7, 15]


def masks_of(rows: list[int], allowed: list[list[int]]) -> TokenMasks:
    bits = np.zeros((len(rows), 32), np.uint8)
    for row, tokens in enumerate(allowed):
        bits[row, tokens] = 1
    return TokenMasks(rows=np.array(rows), bits=np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def test_only_the_named_rows_lose_tokens_and_the_logits_stay() -> None:
    scores = torch.randn(3, VOCAB_SIZE)
    before = scores.clone()
    masked = masked_scores(scores, masks_of([1], [ALLOWED]))
    assert torch.equal(scores, before)
    assert torch.equal(masked[[0, 2]], scores[[0, 2]])
    assert torch.isfinite(masked[1]).nonzero()[:, 0].tolist() == ALLOWED
    assert torch.equal(masked[1, ALLOWED], scores[1, ALLOWED])


def test_a_bit_of_every_place_in_a_word_is_its_token() -> None:
    vocab_size = 100
    scores = torch.zeros(vocab_size, vocab_size)
    words = np.zeros((vocab_size, 4), np.uint32)
    for token in range(vocab_size):
        words[token, token // 32] = 1 << (token % 32)
    masked = masked_scores(scores, TokenMasks(rows=np.arange(vocab_size), bits=words.view(np.int32)))
    assert masked.argmax(1).tolist() == list(range(vocab_size))


def drawn(num_rows: int, allowed: list[int], *, off_by: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one row of equal logits, drawn with many seeds, and their probabilities under the mask."""
    row = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    inputs = step_inputs(
        [[3]] * num_rows, context_lens=[5] * num_rows, num_candidates=[0] * num_rows, temperature=1.0,
        seeds=list(range(num_rows)),
    )  # fmt: skip
    rows = [r * WIDTH + off_by for r in range(num_rows)]
    acceptance = sample_and_accept(row.repeat(num_rows * WIDTH, 1), inputs, masks=masks_of(rows, [allowed] * num_rows))
    probability = torch.zeros(VOCAB_SIZE)
    probability[allowed] = row[allowed].softmax(0)
    return acceptance.emitted_tokens[:, 0], probability


def chi_square(tokens: torch.Tensor, probability: torch.Tensor) -> float:
    """Per degree of freedom; infinite where a token came that may not."""
    counts, expected = torch.bincount(tokens.long(), minlength=VOCAB_SIZE), probability * len(tokens)
    if counts[probability == 0].any():
        return math.inf
    kept = probability > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum()) / (int(kept.sum()) - 1)


def test_sampled_tokens_have_the_masked_distribution() -> None:
    assert chi_square(*drawn(4000, ALLOWED)) < 4.0  # 3 degrees of freedom: exceeded once in 140 000


def test_a_mask_one_row_off_is_noticed() -> None:
    assert chi_square(*drawn(400, ALLOWED, off_by=1)) == math.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_before_the_mask(temperature) -> None:
    logits = torch.randn(WIDTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    inputs = step_inputs([[3]], context_lens=[5], num_candidates=[0], temperature=temperature)
    acceptance = sample_and_accept(logits, inputs, masks=masks_of([0], [[4, 9]]))
    token = int(acceptance.emitted_tokens[0, 0])
    assert token in (4, 9)
    assert acceptance.emitted_logprobs[0, 0] == pytest.approx(float(logits[0].log_softmax(0)[token]))


def test_a_row_that_may_give_no_token_gives_none() -> None:
    logits = torch.randn(WIDTH, VOCAB_SIZE)
    inputs = step_inputs([[3]], context_lens=[5], num_candidates=[0])
    acceptance = sample_and_accept(logits, inputs, masks=masks_of([0], [[]]))
    assert math.isnan(acceptance.emitted_logprobs[0, 0])
    assert torch.isfinite(acceptance.emitted_logprobs[0, 1:]).all()


def test_a_draft_is_accepted_only_if_the_masked_target_gives_it() -> None:
    logits = torch.zeros(WIDTH, VOCAB_SIZE)
    logits[:, 5], logits[:, 6] = 3.0, 2.0
    inputs = step_inputs([[3, 5, 5, 5]], context_lens=[5], num_candidates=[3])
    free = sample_and_accept(logits, inputs)
    assert free.num_accepted.tolist() == [3]
    masked = sample_and_accept(logits, inputs, masks=masks_of([0, 1], [[5, 6], [6]]))
    assert masked.num_accepted.tolist() == [1] and masked.emitted_tokens[0, :2].tolist() == [5, 6]


def test_a_mask_holds_for_scores_that_rules_have_adjusted() -> None:
    """A penalty on the token that the mask and the logits like best leaves the next one."""
    logits = torch.zeros(WIDTH, VOCAB_SIZE)
    logits[:, 5], logits[:, 6] = 3.0, 2.0
    inputs = step_inputs([[3]], context_lens=[5], num_candidates=[0])

    def penalize(scores: torch.Tensor) -> None:
        scores[:, 5] -= 2.0

    masks = masks_of([0], [[4, 5, 6]])
    assert sample_and_accept(logits, inputs, masks=masks).emitted_tokens[0, 0] == 5
    assert sample_and_accept(logits, inputs, penalize, masks).emitted_tokens[0, 0] == 6
    assert sample_and_accept(logits, inputs, penalize, masks_of([0], [[4, 5]])).emitted_tokens[0, 0] == 5
