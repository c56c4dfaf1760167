"""Filters against plain definitions, draws against their probabilities."""

from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.torch.sampling import draft_tokens, filtered_weights, sample_and_accept
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from dflash_trt.network.ops import Acceptance


def weights_of(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    scaled = torch.tensor([logits]) / temperature
    return filtered_weights(
        scaled, top_k=torch.tensor([top_k]), top_p=torch.tensor([top_p]), min_p=torch.tensor([min_p])
    )[0]


LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log().tolist()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.65}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.25}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 4, "top_p": 0.89}, [0, 1, 2]),  # of the mass 0.95 that top_k left, 0.89 * 0.95 = 0.8455
        ({"top_k": 3, "min_p": 0.35}, [0, 1]),
    ],
)
def test_filters_keep_exactly_the_tokens_of_their_definition(filters, kept):
    assert weights_of(LOGITS, **filters).nonzero()[:, 0].tolist() == kept


def test_a_row_without_top_p_keeps_its_whole_tail_beside_a_row_with_it():
    """Tail tokens of 1e-9 that a float32 sum beside 1.0 cannot tell apart."""
    tailed = torch.tensor([[0.0, *[-20.0] * 4, *[-21.0] * 4]]).expand(3, -1)
    top_k, top_p = torch.tensor([0, 0, 5]), torch.tensor([0.5, 1.0, 1.0])
    kept = filtered_weights(tailed, top_k=top_k, top_p=top_p, min_p=torch.zeros(3)) > 0
    assert kept.sum(dim=1).tolist() == [1, 9, 5]


def test_temperature_sharpens_before_the_filters():
    assert weights_of(LOGITS, temperature=0.25, top_p=0.9).nonzero()[:, 0].tolist() == [0]


PROBABILITIES = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
NUM_DRAWS = 8000


def counts_of(**filters):
    """Of the tokens that so many seeds draw."""
    sampling = StepSampling(temperature=0.8, **filters)
    rows = [replace(sampling, seed=seed) for seed in range(NUM_DRAWS)]
    tokens = sample_and_accept(PROBABILITIES.log().expand(NUM_DRAWS, -1), one_row_each(rows)).emitted_tokens
    return torch.bincount(tokens.flatten(), minlength=5)


def chi_square(counts, probabilities):
    expected = NUM_DRAWS * probabilities / probabilities.sum()
    return float(((counts - expected) ** 2 / expected)[expected > 0].sum())


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({}, 5),
        ({"top_k": 3}, 3),
        ({"top_p": 0.9}, 4),
        ({"min_p": 0.2}, 3),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.01}, 3),
    ],
)
def test_draws_follow_the_filtered_distribution(filters, kept):
    counts = counts_of(**filters)
    weights = PROBABILITIES ** (1 / 0.8)
    weights[kept:] = 0
    assert counts[kept:].sum() == 0
    assert chi_square(counts, weights) < 18.5  # 99.9 % of fair samples at four degrees of freedom, the most here
    wrong = torch.where(torch.arange(5) == 1, 1.15 * weights, weights)
    assert chi_square(counts, wrong) > 18.5  # the negative control: one token 15 % likelier


def test_drafts_of_the_targets_distribution_are_its_own_tokens_whatever_the_filters_are_off():
    sampling = [StepSampling(temperature=temperature, seed=5) for temperature in (0.0, 0.7, 1.3)]
    inputs = one_row_each(sampling)
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(2))
    expected = sample_and_accept(logits, inputs).emitted_tokens
    before = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, inputs.positions))
    assert draft_tokens(logits, inputs, before, None, draft_topk=4).tokens.tolist() == expected.tolist()
    later = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, inputs.positions + 1))
    # the negative control: another position's noise
    other = draft_tokens(logits, inputs, later, None, draft_topk=4).tokens.tolist()
    assert other[0] == expected[0].tolist() and other[1] != expected[1].tolist() != other[2]


def test_a_draft_vocabulary_has_the_noise_of_the_targets_tokens():
    """Where the drafter has every likely token of the target, under other ids, it proposes what the target draws."""
    inputs = one_row_each([StepSampling(temperature=1.0, seed=seed) for seed in range(50)])
    to_target = torch.tensor([3, 90, 91, 200, 399])
    target = torch.full((50, 400), -30.0).index_fill(1, to_target, 1.0)
    acceptance = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, inputs.positions))
    drafts = draft_tokens(torch.ones(50, 5), inputs, acceptance, to_target, draft_topk=4).tokens
    assert drafts.tolist() == sample_and_accept(target, inputs).emitted_tokens.tolist()
    assert len(set(drafts.flatten().tolist())) == 5


def one_row_each(samplings):
    """The inputs of a step of requests without drafts."""
    requests = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=(0,),
            context_len=20,
            num_candidates=0,
            page_ids=(0,) * 8,
            sampling=sampling,
        )
        for index, sampling in enumerate(samplings)
    )
    return step_inputs(StepBatch(requests=requests, num_draft_tokens=0))
