"""FP8 activations against the definition of the format, code for code."""

import pytest
import torch

from dflash_trt.formats.fp8 import e4m3
from dflash_trt.kernels.row_codes_launch import quantize_fp8


def values(dtype):
    """Every scale of magnitude, ties between codes, subnormals, zeros and values that saturate."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = codes[codes.isfinite()].sort().values
    random = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-4, 3, 5000)
    return torch.cat((finite, (finite[1:] + finite[:-1]) / 2, random, torch.tensor([1e6, -1e6, 0.0]))).to(dtype)


@pytest.mark.parametrize("scale", [1.0, 0.037])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_rounded_to_nearest_even_and_saturate(dtype, scale, device):
    x = values(dtype).to(device)
    expected = e4m3(x.float() / torch.tensor(scale, device=device))
    codes = quantize_fp8(x, torch.tensor([scale], device=device))
    assert torch.equal(codes.float(), expected.float())
    other = quantize_fp8(x, torch.tensor([scale * 1.07], device=device))  # the negative control
    assert not torch.equal(other.float(), expected.float())
