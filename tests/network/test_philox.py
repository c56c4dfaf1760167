"""Known answers are those of Random123's kat_vectors file for philox4x32-10; the noise is a Gumbel variable of them."""

import math

import numpy as np
import pytest
import torch

from dflash_trt.backends.torch.philox import gumbel_noise, philox, token_words


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    words = philox(tuple(np.array([word], np.uint64) for word in key), tuple(np.array([w], np.uint64) for w in counter))
    assert tuple(words[:, 0].tolist()) == expected


def test_the_words_of_a_position_are_the_published_ones_four_tokens_each():
    """Key and counter 0: Random123's first known answer."""
    words = token_words(torch.tensor([0]), torch.tensor([0]), 6)
    assert words[0, :4].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    zero, one = (np.array([word], np.uint64) for word in (0, 1))
    assert words[0, 4:].tolist() == [int(word[0]) for word in philox((zero, zero), (zero, one, zero, zero))[:2]]


def test_noise_is_finite_at_both_ends_of_the_words(monkeypatch):
    ends = torch.tensor([[0, 1, 2**32 - 1]])
    monkeypatch.setattr("dflash_trt.backends.torch.philox.token_words", lambda *_: ends)
    most, more, least = gumbel_noise(torch.tensor([0]), torch.tensor([0]), 3)[0].tolist()
    assert most == pytest.approx(33 * math.log(2)) and more == pytest.approx(most - math.log(3), rel=1e-6)
    assert least == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_noise_follows_the_gumbel_distribution():
    noise = gumbel_noise(torch.full((40,), 7), torch.arange(40), 500).flatten()
    u = (-(-noise).exp()).exp()  # its distribution function
    histogram = torch.histc(u, bins=20, min=0, max=1)
    chi_square = ((histogram - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; fixed seed, so never flaky


def test_noise_depends_on_the_position_and_on_both_halves_of_the_seed():
    pairs = [(seed, 3) for seed in (0, 1, 1 << 32, 1 << 62)] + [(0, 4), (0, 2**31 - 1)]
    rows = [gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 8) for seed, position in pairs]
    assert len({float(value) for row in rows for value in row[0]}) == 8 * len(pairs)
