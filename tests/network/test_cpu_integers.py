"""Integers of eight bits on the CPU kernels against PyTorch's, in every instruction set."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.int8_linear import apply_int8
from dflash_trt.backends.torch.native.library import CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.native.linear import PanelLinear, integer_linear
from dflash_trt.backends.torch.quantized_linear import prepare_linear
from dflash_trt.formats.int8 import MAX_COLUMNS, Int8Weight
from dflash_trt.formats.registry import weight_format
from dflash_trt.network.ops import Linear
from tests.network.independent_rows import assert_rows_are_independent

if isinstance(found := cpu_kernels(), NoKernels):
    pytest.skip(f"no CPU kernels: {found.reason}", allow_module_level=True)

SHAPES = [(32, 64), (96, 33), (70, 161), (256, 384), (1, 1), (512, 3)]  # also of panels and groups that are not full
ROWS = [1, 2, 3, 5, 8, 9, 13, 70, 300]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_weight(shape: tuple[int, ...]) -> Int8Weight[Tensor]:
    """All codes that a checkpoint may hold, -128 too."""
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    return Int8Weight(segments=(shape[-2],), codes=codes, weight_scale=torch.logspace(-3, 2, shape[-2]))


def layer_of(weight: Int8Weight[Tensor], kernels: CpuKernels, bias: Tensor | None = None) -> PanelLinear:
    layer = integer_linear(Linear(weight=weight, bias=bias), kernels)
    assert layer is not None
    return layer


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_gives_the_bits_of_its_format(kernels: CpuKernels, shape: tuple[int, int]) -> None:
    weight, bias = random_weight(shape), torch.randn(shape[0])
    plain, with_bias = layer_of(weight, kernels), layer_of(weight, kernels, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]) * torch.logspace(-30, 30, num_rows)[:, None]
        expected = apply_int8(x, weight, None)
        assert torch.equal(plain(x), expected)
        assert torch.equal(with_bias(x), expected + bias)
    weight.codes[-1, -1] ^= 1  # the negative control: the last input of the last output
    x = torch.ones(1, shape[1])
    assert not torch.equal(layer_of(weight, kernels)(x), plain(x))


def test_sums_are_exact_for_as_many_inputs_as_the_format_has(kernels: CpuKernels) -> None:
    signs = torch.tensor([-128, 127], dtype=torch.int8)[:, None].expand(2, MAX_COLUMNS)
    weight = Int8Weight(segments=(2,), codes=signs.contiguous(), weight_scale=torch.ones(2))
    x = torch.stack((torch.ones(MAX_COLUMNS), -torch.ones(MAX_COLUMNS))) * 127
    expected = torch.tensor([[-128.0, 127.0], [128.0, -127.0]]) * 127 * MAX_COLUMNS
    assert torch.equal(layer_of(weight, kernels)(x), expected)


def test_activations_round_to_even_and_their_scale_is_of_the_row(kernels: CpuKernels) -> None:
    weight = Int8Weight(segments=(4,), codes=torch.eye(4).to(torch.int8), weight_scale=torch.ones(4))
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [-254.0, 1.0, 3.0, -5.0], [0.0, 0.0, 0.0, 0.0], [1e-41, 0, 0, 0]])
    codes = torch.tensor([[127.0, 0, 2, -2], [-127, 0, 2, -2], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(layer_of(weight, kernels)(x), codes * torch.tensor([1.0, 2, 1, 1])[:, None])


def test_a_row_has_the_same_bits_alone_and_among_others(kernels: CpuKernels) -> None:
    layer = layer_of(random_weight((160, 250)), kernels, torch.randn(160))
    assert_rows_are_independent(layer, torch.randn(75, 250))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(kernels: CpuKernels, value: float) -> None:
    x = torch.randn(9, 64)
    x[4, 3] = value
    finite = layer_of(random_weight((64, 64)), kernels)(x).isfinite()
    assert finite.any(dim=1).tolist() == [row != 4 for row in range(9)] and finite.all(dim=1).sum() == 8


def test_the_kernels_take_integers_alone(kernels: CpuKernels) -> None:
    def taken(linear: Linear[Tensor], dtype: torch.dtype = torch.float32) -> bool:
        return isinstance(prepare_linear(linear, dtype, kernels=kernels), PanelLinear)

    weight = random_weight((32, 64))
    assert taken(Linear(weight=weight)) and not taken(Linear(weight=weight), torch.bfloat16)
    experts = random_weight((3, 32, 64))
    assert not taken(Linear(weight=replace(experts, weight_scale=torch.ones(3, 32))))
    others = weight_format("fp8").quantize(
        torch.randn(32, 64), segments=(32,), weight_amax=torch.ones(1), input_amax=torch.ones(1)
    )
    assert integer_linear(Linear(weight=others), kernels) is None
