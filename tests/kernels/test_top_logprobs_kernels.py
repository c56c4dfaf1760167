"""The most likely tokens by the kernels are those by PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.logprobs import score_rows as score_rows_by_torch
from dflash_trt.kernels.sampling_launch import TILE, score_rows
from tests.kernels_on import DEVICE

SIZES = [15, 512, TILE, 2 * TILE + 9]
ROWS = torch.tensor([5, 1, 2, 3, 0])


def make_logits(vocab_size: int) -> Tensor:
    """Drawn ones; many that are equal; -infinity but for two; all equal."""
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    logits[1] = logits[1].round()
    logits[2] = -torch.inf
    logits[2, [vocab_size - 1, 7]] = torch.tensor([1.0, 0.5])
    logits[3] = -150.0
    return logits


def on_device(logits: Tensor, num_top: int, **tensors: Tensor) -> tuple[Any, ...]:
    found = score_rows(logits.to(DEVICE), num_top, **{name: x.to(DEVICE) for name, x in tensors.items()})
    return tuple(x if x is None else x.cpu() for x in found)


@pytest.mark.parametrize("num_top", [0, 1, 2, 20])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_top_tokens_are_those_of_pytorch(vocab_size: int, num_top: int) -> None:
    logits = make_logits(vocab_size)
    tokens = torch.tensor([0, vocab_size - 1, 7, 3, 1])
    found = on_device(logits, num_top, rows=ROWS, tokens=tokens)
    expected = score_rows_by_torch(logits, num_top, rows=ROWS, tokens=tokens)
    assert torch.equal(found[0], expected[0])
    assert found[0].shape == (len(ROWS), min(num_top, vocab_size))
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_all_rows_without_tokens() -> None:
    logits = make_logits(700).bfloat16()
    found, expected = on_device(logits, 3), score_rows_by_torch(logits, 3)
    assert torch.equal(found[0], expected[0]) and found[2] is None
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_distribution_has_nan_and_tokens_of_the_vocabulary(value: float) -> None:
    logits = make_logits(TILE + 40)
    logits[0, 3] = value
    logits[1] = torch.nan
    top, logprobs, of_tokens = on_device(logits, 20, tokens=torch.full((6,), 5))
    assert logprobs[:2].isnan().all() and of_tokens[:2].isnan().all()
    assert not logprobs[2:].isnan().any() and not of_tokens[2:].isnan().any()
    assert ((top >= 0) & (top < logits.shape[1])).all()
