"""The numbers of `dflash-trt eval`, against PyTorch's own KL divergence and cross entropy."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_trt.bench.comparison import Acceptance, Gate, acceptance_of, compare, scores_of_logits, scores_of_top_tokens
from dflash_trt.core.logprobs import PromptLogprob, TokenLogprob
from dflash_trt.core.request import GenerationOutput

VOCAB = 12
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def output(token_ids: list[int], *, num_steps: int = 0, num_emitted: int = 0) -> GenerationOutput:
    return GenerationOutput(
        request_id="r",
        text=None,
        token_ids=tuple(token_ids),
        logprobs=(),
        finish_reason="length",
        num_prompt_tokens=1,
        num_verify_steps=num_steps,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_emitted_by_verify=num_emitted,
        time_to_first_token_s=0.0,
        total_s=0.0,
    )


def logits_of(seed: int):
    """A model: logits depend on the token alone."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return table, lambda token_ids: table[list(token_ids)].numpy()


def test_every_number_equals_that_of_pytorch() -> None:
    (first, baseline), (second, candidate) = logits_of(0), logits_of(1)
    texts = [[7, 8, 9, 10], [1], [2, 3]]
    outputs = [output(text) for text in texts]
    found = compare(PROMPTS, outputs, outputs, baseline_logits=baseline, candidate_scores=scores_of_logits(candidate))
    sequences = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    rows = [s[i] for p, s in zip(PROMPTS, sequences, strict=True) for i in range(len(p) - 1, len(s) - 1)]
    p, q = first[rows].double().log_softmax(-1), second[rows].double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.num_generated_positions == len(rows) == 7
    assert found.kl_nats == pytest.approx(kl.mean().item(), rel=1e-9)
    assert found.kl_nats_p99 == pytest.approx(np.quantile(kl.numpy(), 0.99), rel=1e-9)
    assert found.token_agreement_fraction == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    pairs = [(a, b) for prompt in PROMPTS for a, b in itertools.pairwise(prompt)]
    known, wanted = torch.tensor([a for a, _ in pairs]), torch.tensor([b for _, b in pairs])
    assert found.num_prompt_positions == len(pairs) == 3
    for table, perplexity in ((first, found.baseline_perplexity), (second, found.candidate_perplexity)):
        expected = torch.nn.functional.cross_entropy(table[known].double(), wanted).exp().item()
        assert perplexity == pytest.approx(expected, rel=1e-9)


def test_of_an_engine_without_logits_the_divergence_is_that_of_its_top_tokens_and_the_rest() -> None:
    (first, baseline), (second, candidate) = logits_of(0), logits_of(1)
    texts = [[7, 8, 9, 10], [1], []]
    outputs = [output(text) for text in texts]
    whole = compare(PROMPTS, outputs, outputs, baseline_logits=baseline, candidate_scores=scores_of_logits(candidate))
    divergences = []
    for num_top in (1, 4, VOCAB - 1, VOCAB):
        scored = {
            tuple(prompt + text[:-1]): top_of(second, prompt + text[:-1], num_top) for prompt, text in paired(texts)
        }
        scores = scores_of_top_tokens(scored)
        sides = {"baseline_logits": baseline, "candidate_scores": scores, "kl_num_top": num_top}
        found = compare(PROMPTS, outputs, outputs, **sides)
        rows = [s[i] for p, t in paired(texts) for s in [p + t] for i in range(len(p) - 1, len(s) - 1)]
        p, q = first[rows].double().softmax(-1), second[rows].double().softmax(-1)
        top = q.topk(num_top).indices
        parts = [torch.cat((x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)), 1) for x in (p, q)]
        p, q = (part.clamp(min=1e-12) for part in parts)
        assert found.kl_nats == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
        assert found.candidate_perplexity == pytest.approx(whole.candidate_perplexity, rel=1e-6)
        assert found.token_agreement_fraction == whole.token_agreement_fraction
        assert (found.num_generated_positions, found.kl_num_top) == (whole.num_generated_positions, num_top)
        divergences.append(found.kl_nats)
    assert 0 < divergences[0] < divergences[1] < divergences[2]
    assert divergences[3] == pytest.approx(whole.kl_nats, rel=1e-4)


def paired(texts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    return list(zip(PROMPTS, texts, strict=True))


def top_of(table: torch.Tensor, token_ids: list[int], num_top: int) -> GenerationOutput:
    """What an engine says of a prompt, and of the token that it generates after it."""
    logprobs = table.log_softmax(-1)

    def top(token: int) -> tuple[TokenLogprob, ...]:
        values, ids = logprobs[token].topk(num_top)
        return tuple(map(TokenLogprob, ids.tolist(), values.tolist()))

    entries = [PromptLogprob(b, float(logprobs[a, b]), top(a)) for a, b in itertools.pairwise(token_ids)]
    return replace(output([0]), prompt_logprobs=(None, *entries), top_logprobs=(top(token_ids[-1]),))


def test_the_numbers_of_each_text_make_up_those_of_all() -> None:
    (_, baseline), (_, candidate) = logits_of(0), logits_of(1)
    ours = [output([7, 8, 9], num_steps=2, num_emitted=3), output([1, 2]), output([3, 4]), output([])]
    theirs = [output([7, 8, 1], num_steps=4, num_emitted=5), output([1, 2]), output([3]), output([5])]
    found = compare(
        [*PROMPTS, [2]], ours, theirs, baseline_logits=baseline, candidate_scores=scores_of_logits(candidate)
    )
    rows = [text.as_row() for text in found.texts]
    assert [(row["num_tokens"], row["num_equal_tokens"], row["is_identical"]) for row in rows] == [
        (3, 2, False),
        (2, 2, True),
        (2, 1, False),
        (0, 0, False),
    ]
    assert found.identical_texts_fraction == 0.25
    lengths = (rows[0]["baseline_acceptance_length"], rows[0]["candidate_acceptance_length"])
    assert lengths == (1.5, 1.25) and rows[1]["candidate_acceptance_length"] is None
    for name in ("kl_nats", "token_agreement_fraction"):
        total = sum(row[name] * row["num_tokens"] for row in rows if row["num_tokens"])
        assert total / 7 == pytest.approx(getattr(found, name)) and rows[3][name] is None
    assert "texts" not in found.as_json()


def test_an_engine_equals_itself() -> None:
    _, model = logits_of(0)
    outputs = [output([7, 8], num_steps=2, num_emitted=3)] * 3
    found = compare(PROMPTS, outputs, outputs, baseline_logits=model, candidate_scores=scores_of_logits(model))
    assert (found.kl_nats, found.token_agreement_fraction, found.identical_texts_fraction) == (0.0, 1.0, 1.0)
    assert found.acceptance_ratio == 1.0
    assert found.baseline_acceptance == Acceptance(acceptance_length=1.5, num_verify_steps=6)


def test_a_single_token_has_no_position_to_compare() -> None:
    _, model = logits_of(0)
    outputs = [output([]), output([7])]

    def scored(token_ids: Sequence[int]) -> np.ndarray:
        assert len(token_ids) > 0
        return model(token_ids)

    found = compare([[6], [5]], outputs, outputs, baseline_logits=scored, candidate_scores=scores_of_logits(scored))
    assert (found.num_prompts, found.num_generated_positions, found.num_prompt_positions) == (2, 1, 0)


def test_texts_that_differ_are_counted() -> None:
    _, model = logits_of(0)
    ours = [output([7, 8]), output([7, 9]), output([7])]
    theirs = [output([7, 8]), output([7, 8]), output([7, 8])]
    found = compare(PROMPTS, theirs, ours, baseline_logits=model, candidate_scores=scores_of_logits(model))
    assert found.identical_texts_fraction == pytest.approx(1 / 3)


def test_the_ratio_of_acceptance_is_that_of_the_candidate_to_the_baseline() -> None:
    _, model = logits_of(0)
    found = compare(
        [[1]], [output([1])], [output([1])], baseline_logits=model, candidate_scores=scores_of_logits(model)
    )
    for candidate, baseline, ratio in ((3.0, 2.0, 1.5), (None, 2.0, None), (3.0, None, None)):
        sides = [Acceptance(acceptance_length=length, num_verify_steps=1) for length in (candidate, baseline)]
        assert replace(found, candidate_acceptance=sides[0], baseline_acceptance=sides[1]).acceptance_ratio == ratio


def test_acceptance_weighs_every_step_alike() -> None:
    outputs = [output([1], num_steps=10, num_emitted=20), output([1], num_steps=1, num_emitted=9)]
    assert acceptance_of(outputs) == Acceptance(acceptance_length=29 / 11, num_verify_steps=11)
    assert acceptance_of([output([1])]) == Acceptance(acceptance_length=None, num_verify_steps=0)
    assert acceptance_of([]) == Acceptance(acceptance_length=None, num_verify_steps=0)


@pytest.mark.parametrize(
    ("value", "is_upper", "has_passed"),
    [(0.5, True, True), (0.4, True, True), (0.6, True, False), (0.6, False, True), (0.4, False, False)],
)
def test_a_gate_holds_its_bound(value: float, is_upper: bool, has_passed: bool) -> None:
    assert Gate(name="x", bound=0.5, value=value, is_upper=is_upper).has_passed is has_passed


@pytest.mark.parametrize("value", [None, math.nan])
def test_what_was_not_measured_passes_no_gate(value: float | None) -> None:
    assert not Gate(name="x", bound=0.5, value=value, is_upper=True).has_passed
    assert not Gate(name="x", bound=0.5, value=value, is_upper=False).has_passed
