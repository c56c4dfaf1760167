"""The rules of logits against the processors of transformers, one row at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.sampling import adjust_scores, adjustment
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, plan_of
from dflash_trt.core.logit_rules import LogitRules, RuledSlots
from dflash_trt.core.request import Request
from dflash_trt.core.sampling import SamplingParams

VOCAB_SIZE = 24
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
STOP = (7, 0)
BAD = ((11,), (4, 1, 12), (9, 2), (1, 5), (2, 6, 13, 14))
CASES = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition is rewarded": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.3},
    "bias": {"logit_bias": {3: 2.5, 20: -100.0, 6: 1.25}},
    "bad words": {"bad_words": ("x",)},
    "min tokens": {"min_tokens": 12},
}
CASES["all"] = {name: value for case in list(CASES.values()) for name, value in case.items()}


def make_request(prompt: tuple[int, ...] = PROMPT, **sampling) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        stop_token_ids=frozenset(STOP),
        bad_word_ids=BAD if "bad_words" in sampling else (),
    )


def output_penalties(ids: Tensor, scores: Tensor, *, num_prompt: int, sampling: SamplingParams) -> Tensor:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, as OpenAI documents them."""
    for token in set(ids[0, num_prompt:].tolist()):
        count = ids[0, num_prompt:].tolist().count(token)
        scores[0, token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return scores


def reference(request: Request, ids: list[int], scores: Tensor) -> Tensor:
    """One row by transformers; `ids` are all tokens before it."""
    sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if request.bad_word_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in request.bad_word_ids]))
    if sampling.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, list(STOP)))
    row = torch.tensor([ids])
    return output_penalties(row, processors(row, scores[None].clone()), num_prompt=num_prompt, sampling=sampling)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_out", [0, 1, 5, 9])
def test_every_row_of_a_verify_block_is_what_transformers_computes(case, num_out) -> None:
    request = make_request(**CASES[case])
    rules = LogitRules.of(request)
    assert rules is not None
    random = np.random.default_rng(num_out)
    tokens = np.array([*PROMPT, *random.integers(0, VOCAB_SIZE, num_out), *random.choice([1, 2, 6, 9, 13], 5)])
    num_known = len(PROMPT) + num_out + np.array([0, 1, 2, 3, 4, 5, 5, 5])  # as rows repeat the last one
    scores = 3 * torch.randn(len(num_known), VOCAB_SIZE, generator=torch.Generator().manual_seed(num_out))
    expected = torch.stack([
        reference(request, tokens[:known].tolist(), row) for known, row in zip(num_known, scores, strict=True)
    ])  # fmt: skip
    assert not torch.equal(expected, scores) or (num_out == 0 and case in ("presence", "frequency"))
    adjusted = scores.clone()
    adjust_scores(adjusted, rules, tokens, num_known)
    torch.testing.assert_close(adjusted, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(adjusted.isinf(), expected.isinf())


def test_tokens_behind_a_row_change_nothing_of_it() -> None:
    rules = LogitRules.of(make_request(**CASES["all"]))
    assert rules is not None
    scores = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found = []
    for rest in ([5, 5, 5], [2, 1, 4]):
        row = scores.clone()
        adjust_scores(row, rules, np.array([*PROMPT, 8, *rest]), np.array([len(PROMPT) + 1]))
        found.append(row)
    assert torch.equal(*found)


def test_a_word_is_banned_only_behind_all_of_its_tokens_and_not_before_the_text() -> None:
    rules = LogitRules.of(make_request(prompt=(2,), bad_words="x"))
    assert rules is not None
    for tokens, banned in (([2], {11}), ([2, 6], {11}), ([2, 6, 13], {11, 14}), ([6, 2, 6, 13], {11, 14})):
        scores = torch.zeros(1, VOCAB_SIZE)
        adjust_scores(scores, rules, np.array(tokens), np.array([len(tokens)]))
        assert set(scores[0].isinf().nonzero()[:, 0].tolist()) == banned, tokens


@pytest.mark.parametrize("beyond", [0, 5])
def test_ids_beyond_the_vocabulary_are_ignored(beyond: int) -> None:
    rules = LogitRules.of(make_request(min_tokens=3, logit_bias={1: 1.0, VOCAB_SIZE + beyond: 9.0}))
    assert rules is not None
    scores = torch.zeros(1, VOCAB_SIZE)
    adjust_scores(scores, rules, np.array(PROMPT), np.array([len(PROMPT)]))
    assert scores[0, 1] == 1.0 and scores[0].sum() == -torch.inf and scores[0].isinf().sum() == len(STOP)


@pytest.mark.parametrize("case", CASES)
def test_the_rows_of_a_step_know_all_tokens_up_to_their_own(case: str) -> None:
    """Of chunks and of verify blocks in one step, beside a request without rules."""
    request, num_drafts = make_request(**CASES[case]), 3
    rules = LogitRules.of(request)
    texts = [(*PROMPT, *tail) for tail in ((4, 1, 9, 2), (9, 2, 6, 13, 1), (1,), (2, 6, 1, 5, 7, 0))]
    num_candidates = (0, 3, 0, 2)
    own = (5, 4, 9, 5)  # tokens that the step computes: the last of each text
    requests = tuple(
        ScheduledRequest(
            request_id=str(i),
            token_ids=text[-count:],
            context_len=len(text) - count,
            num_candidates=candidates,
            page_ids=(i,),
            sampling=StepSampling(),
            logit_rules=None if i == 2 else rules,
            known_tokens=text[:-count],
        )
        for i, (text, count, candidates) in enumerate(zip(texts, own, num_candidates, strict=True))
    )
    batch = StepBatch(requests=requests, num_draft_tokens=num_drafts)
    adjust = adjustment(RuledSlots(64), plan_of(batch), step_inputs(batch))
    assert adjust is not None
    scores = 3 * torch.randn(len(texts) * (num_drafts + 1), VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    expected = scores.clone()
    for i, (text, candidates) in enumerate(zip(texts, num_candidates, strict=True)):
        for j in range(num_drafts + 1):
            row, ids = i * (num_drafts + 1) + j, text[: len(text) - candidates + min(j, candidates)]
            if i != 2:
                expected[row] = reference(request, list(ids), scores[row])
    adjust(scores)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=1e-6)
