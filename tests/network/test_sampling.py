"""Filters against plain definitions, draws against their probabilities."""

import pytest
import torch

from dflash_trt.backends.torch.sampling import draw, filtered_weights


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


def test_tokens_of_weight_zero_are_never_drawn_even_at_the_ends():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    u = torch.tensor([0.0, 0.3, 1.0 - 2**-24])
    assert draw(weights, u).tolist() == [1, 3, 3]


def test_draws_follow_the_weights():
    weights = torch.tensor([[1.0, 2.0, 5.0]]).expand(4000, -1)
    u = (torch.arange(4000) + 0.5) / 4000
    counts = torch.bincount(draw(weights, u), minlength=3)
    assert counts.tolist() == [500, 1000, 2500]
