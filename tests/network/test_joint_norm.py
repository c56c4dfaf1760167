"""A norm over features that ranks share: each rank normalizes its own part by the mean square of all."""

from typing import Any

import pytest
import torch

from dflash_trt.backends.cuda.ops import TorchGpuOps
from dflash_trt.backends.torch.ops import TorchOps

EPS = 1e-6


class _WithOther:
    """The sum over two ranks: what this one gives, and what `other` gives."""

    num_ranks = 2

    def __init__(self, other: torch.Tensor) -> None:
        self._other = other

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._other


def _op(kind: type[Any], ranks: _WithOther) -> Any:
    op = kind.__new__(kind)
    op._ranks = ranks
    return op


@pytest.mark.parametrize("kind", [TorchOps, TorchGpuOps])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_halves_on_two_ranks_give_the_norm_of_the_whole(kind: type[Any], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (3 * torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (64,)))
    x[:, :32] *= 4  # unlike halves
    expected = torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), EPS)
    halves, weights = x.chunk(2, 1), weight.chunk(2)
    means = [half.float().square().mean(-1, keepdim=True) for half in halves]
    for rank in (0, 1):
        ranks = _WithOther(means[1 - rank])
        found = _op(kind, ranks).joint_rms_norm(halves[rank], weights[rank], EPS)
        wanted = expected.chunk(2, 1)[rank]
        assert found.dtype == dtype
        assert ((found.float() - wanted).abs() / wanted.abs().max()).max() < tolerance
        alone = torch.nn.functional.rms_norm(halves[rank].float(), (32,), weights[rank].float(), EPS)
        assert ((alone - wanted).abs() / wanted.abs().max()).max() > 0.1  # what a rank alone would give
