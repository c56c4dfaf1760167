"""Known answers are those of Random123's kat_vectors file for philox4x32-10."""

import pytest
import torch

from dflash_trt.backends.torch.philox import philox, uniform


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
    words = philox((torch.tensor([key[0]]), torch.tensor([key[1]])), tuple(torch.tensor([word]) for word in counter))
    assert tuple(int(word) for word in words) == expected


def test_uniform_numbers_are_in_the_unit_interval_and_spread():
    positions = torch.arange(20_000)
    u = uniform(torch.full_like(positions, 7), positions)
    assert u.min() >= 0 and u.max() < 1
    histogram = torch.histc(u, bins=20, min=0, max=1)
    chi_square = ((histogram - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001; fixed seed, so never flaky


def test_uniform_depends_on_both_halves_of_the_seed():
    position = torch.tensor([3])
    draws = {float(uniform(torch.tensor([seed]), position)) for seed in (0, 1, 1 << 32, 1 << 62)}
    assert len(draws) == 4
