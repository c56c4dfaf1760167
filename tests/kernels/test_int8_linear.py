"""INT8 layers on a GPU: the bits of the format's definition, for any number of rows."""

import pytest
import torch

from dflash_trt.backends.torch.int8_linear import apply_int8
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.formats.int8 import token_codes as defined_codes
from dflash_trt.kernels.int8_linear_launch import TILES, Int8Matrix, int8_linear, token_codes
from tests.kernels_on import moved

NUM_OUT = 200  # whole tiles and a part of one


def rows(num_rows: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, one of zeros, and one of ties: whole codes and a half."""
    x = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows))
    x *= torch.logspace(-6, 4, num_rows)[:, None]
    x[num_rows // 2] = 0.0
    x[-1] = torch.arange(num_in) % 127 + 0.5
    x[-1, 0] = -127.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_in", [48, 1500])
def test_codes_of_tokens_are_those_of_the_definition(num_in: int, dtype: torch.dtype) -> None:
    x = rows(5, num_in, dtype)
    expected_codes, expected_scales = defined_codes(x)
    codes, scales = token_codes(moved(x))
    assert torch.equal(codes.cpu(), expected_codes) and torch.equal(scales.cpu(), expected_scales[:, 0])


def test_a_row_that_is_not_finite_has_a_scale_that_is_not() -> None:
    x = torch.zeros(4, 1100)
    x[0, 1050], x[1, 3], x[2, 1099], x[3, 7] = torch.nan, torch.inf, -torch.inf, 1e-44
    codes, scales = token_codes(moved(x))
    assert not codes[:3].any()  # whose products with the scale are NaN
    assert scales.tolist() == [torch.inf] * 3 + [2.0**-126]


@pytest.mark.parametrize(("num_in", "has_bias"), [(64, False), (72, True), (300, True)])
@pytest.mark.parametrize("num_rows", [1, *TILES, 150])
def test_a_layer_has_the_bits_of_its_definition(num_rows: int, num_in: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (NUM_OUT, num_in), generator=generator).to(torch.int8)
    weight_scale = torch.rand(NUM_OUT, generator=generator) + 0.01
    bias = torch.randn(NUM_OUT, generator=generator) if has_bias else None
    x = rows(num_rows, num_in, torch.float32)
    expected = apply_int8(x, Int8Weight(segments=(NUM_OUT,), codes=codes, weight_scale=weight_scale), bias)
    matrix = Int8Matrix(codes=codes, weight_scale=weight_scale, bias=bias)
    assert torch.equal(int8_linear(moved(x), moved(matrix)).cpu(), expected)
    codes[NUM_OUT - 1, num_in - 1] ^= 1
    assert not torch.equal(int8_linear(moved(x), moved(matrix)).cpu(), expected), "the negative control"


def test_tensors_that_the_kernel_would_misread_are_refused() -> None:
    codes, scale = torch.zeros(16, 64, dtype=torch.int8), torch.ones(16)
    Int8Matrix(codes=codes, weight_scale=scale).check()
    with pytest.raises(ValueError, match=r"codes: expected torch\.int8, found torch\.uint8"):
        Int8Matrix(codes=codes.view(torch.uint8), weight_scale=scale).check()
    with pytest.raises(ValueError, match=r"weight_scale: expected shape \[16\], found \[15\]"):
        Int8Matrix(codes=codes, weight_scale=scale[:15]).check()
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 64\], found \[2, 32\]"):
        int8_linear(torch.ones(2, 32), Int8Matrix(codes=codes, weight_scale=scale))
