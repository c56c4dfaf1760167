"""Weights of four bits on the CPU kernels against their formats, in every instruction set."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.linear import apply_linear
from dflash_trt.backends.torch.moe import SeparateExperts, chosen_experts, run_chosen_experts, separated
from dflash_trt.backends.torch.native.four_bits import FourBits, four_bit_linear, stored_linear
from dflash_trt.backends.torch.native.library import CpuKernels, NoKernels, cpu_kernels
from dflash_trt.backends.torch.quantized_linear import prepare_linear
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.executor import opening
from dflash_trt.formats.base import QuantizedWeight
from dflash_trt.formats.registry import dequantize, weight_format, weight_formats
from dflash_trt.network.ops import Linear, StackedExperts
from tests.network.independent_rows import assert_rows_are_independent

if isinstance(found := cpu_kernels(), NoKernels):
    pytest.skip(f"no CPU kernels: {found.reason}", allow_module_level=True)

FORMATS = ["int4", "mxfp4", "nvfp4_w4a16"]
SHAPES = [(32, 64), (96, 32), (70, 160), (256, 384), (1, 96)]  # also of panels that are not full
ROWS = [1, 2, 3, 5, 8, 12, 13, 70]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def quantized(name: str, shape: tuple[int, int]) -> QuantizedWeight[Tensor]:
    """Segments of different scales where the format has them."""
    weight = torch.randn(shape).bfloat16() * torch.logspace(-2, 2, shape[0])[:, None].bfloat16()
    half = shape[0] // 2
    segments = (half, shape[0] - half) if half else (shape[0],)
    amax = torch.stack([part.abs().max().float() for part in torch.split(weight, segments)])
    return weight_format(name).quantize(weight, segments=segments, weight_amax=amax, input_amax=None)


def layer_of(weight: QuantizedWeight[Tensor], kernels: CpuKernels, **options: Any) -> FourBits:
    layer = four_bit_linear(Linear(weight=weight, **options), kernels, rounds_inputs=False)
    assert layer is not None
    return layer


def error(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """Largest error of a product, relative to the sum of its terms' sizes."""
    terms = [x.double(), weight.double(), torch.zeros(len(weight)).double() if bias is None else bias.double()]
    expected = torch.nn.functional.linear(*terms)
    size = torch.nn.functional.linear(*(term.abs() for term in terms))
    return ((found - expected).abs() / size).max().item()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_gives_the_products_of_its_format(kernels: CpuKernels, name: str, shape: tuple[int, int]) -> None:
    weight, bias = quantized(name, shape), torch.randn(shape[0])
    exact = dequantize(weight)
    layer, without_bias = layer_of(weight, kernels, bias=bias), layer_of(weight, kernels)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1])
        assert error(layer(x), x, exact, bias) < 1e-6  # measured 2.8e-7
        assert error(without_bias(x), x, exact) < 1e-6
    weight.tensors()["codes"][shape[0] - 1, -1] ^= 0x70  # the negative control: the last input of the last output
    assert error(layer_of(weight, kernels, bias=bias)(x), x, exact, bias) > 1e-4  # measured 1.8e-3 and more


@pytest.mark.parametrize("name", FORMATS)
def test_each_code_has_its_value(kernels: CpuKernels, name: str) -> None:
    """One input at a time, of every place in a group and every block."""
    weight = quantized(name, (64, 96))
    codes = weight.tensors()["codes"]
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8))
    layer = layer_of(weight, kernels)
    found = layer(torch.eye(96)).t()
    expected = dequantize(weight)
    assert expected.unique().numel() > 60
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_rounded_activations_are_integers_of_eight_bits(kernels: CpuKernels, name: str) -> None:
    weight = quantized(name, (96, 320))
    layer = four_bit_linear(Linear(weight=weight), kernels, rounds_inputs=True)
    assert layer is not None
    exact = dequantize(weight)
    for num_rows in ROWS:
        x = torch.randn(num_rows, 320) * torch.logspace(-3, 3, 320)
        assert error(layer(x), by_block(x, layer.block, 127), exact) < 1e-6
        assert error(layer(x), x, exact) > 1e-3  # measured 1.9e-3 and more


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_codes_and_activations_are_summed_exactly(kernels: CpuKernels, name: str) -> None:
    """Sums of integers of 16 bits hold those of a block, whatever its signs."""
    weight = quantized(name, (40, 64))
    weight.tensors()["block_scale"].fill_(1 if name != "mxfp4" else 127)
    x = torch.stack([torch.full((64,), 127.0), torch.full((64,), -127.0), torch.tensor([127.0, -127.0]).repeat(32)])
    for code in range(16):
        weight.tensors()["codes"].fill_(code * 17)
        layer = four_bit_linear(Linear(weight=weight), kernels, rounds_inputs=True)
        assert layer is not None
        torch.testing.assert_close(layer(x), x @ dequantize(weight).t(), rtol=1e-6, atol=0)


def by_block(x: Tensor, block: int, most: int) -> Tensor:
    """As integers, of which `most` stands for the largest of a block."""
    blocks = x.view(len(x), -1, block)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / most
    return ((blocks / scale).round() * scale).view_as(x)


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(kernels: CpuKernels, name: str, rounds_inputs: bool) -> None:
    layer = four_bit_linear(Linear(weight=quantized(name, (160, 256))), kernels, rounds_inputs=rounds_inputs)
    assert layer is not None
    assert_rows_are_independent(layer, torch.randn(75, 256))


def test_what_is_not_finite_stays_in_its_row(kernels: CpuKernels) -> None:
    x = torch.randn(9, 64)
    x[4, 3] = torch.nan
    values = layer_of(quantized("int4", (64, 64)), kernels)(x)
    assert values.isnan().any(dim=1).nonzero().flatten().tolist() == [4]


def test_other_weights_are_left_to_pytorch(kernels: CpuKernels) -> None:
    def taken(weight: QuantizedWeight[Tensor], dtype: torch.dtype = torch.float32) -> bool:
        return isinstance(prepare_linear(Linear(weight=weight), dtype, kernels=kernels), FourBits)

    def made(name: str) -> QuantizedWeight[Tensor]:
        amax = torch.ones(1)
        input_amax = amax if weight_format(name).has_input_scale else None
        return weight_format(name).quantize(
            torch.randn(32, 128), segments=(32,), weight_amax=amax, input_amax=input_amax
        )

    assert {name for name in weight_formats() if taken(made(name))} == set(FORMATS) == set(opening._FOUR_BITS)
    assert not any(taken(made(name), torch.bfloat16) for name in weight_formats())


def test_prepared_layers_agree_with_those_that_pytorch_computes(kernels: CpuKernels) -> None:
    weight, bias, x = quantized("nvfp4_w4a16", (70, 160)), torch.randn(70), torch.randn(5, 160)
    linear = Linear(weight=weight, bias=bias)
    found = apply_linear(x, prepare_linear(linear, torch.float32, kernels=kernels))
    assert error(found, x, dequantize(weight), bias) < 1e-6


@pytest.mark.parametrize("shape", [(33, 96), (64, 320), (1, 32)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_multiplied_where_they_are_stored(kernels: CpuKernels, name: str, shape: tuple[int, int]) -> None:
    weight, bias = quantized(name, shape), torch.randn(shape[0])
    linear, exact = Linear(weight=weight, bias=bias), dequantize(weight)
    plain, rounded = (stored_linear(linear, kernels, rounds_inputs=rounds) for rounds in (False, True))
    assert plain is not None and rounded is not None
    assert plain.codes.data_ptr() == rounded.codes.data_ptr() == weight.tensors()["codes"].data_ptr()
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]) * torch.logspace(-3, 3, shape[1])
        assert error(plain(x), x, exact, bias) < 1e-6  # measured 1.8e-7, below as well
        assert error(rounded(x), by_block(x, rounded.block, 32767), exact, bias) < 1e-6
    assert error(rounded(x), x, exact, bias) > 3e-6  # measured 1.1e-5 and more
    half = torch.randn(2, shape[1]).bfloat16()
    assert torch.equal(rounded(half), rounded(half.float()).bfloat16())
    for layer in (plain, rounded):
        assert_rows_are_independent(layer, torch.randn(9, shape[1]))
        x[1, 3] = torch.nan
        assert layer(x).isnan().any(dim=1).nonzero().flatten().tolist() == [1]
    assert stored_linear(Linear(weight=quantized("nvfp4_w4a16", (8, 48))), kernels, rounds_inputs=False) is None


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_multiplied_where_they_are_stored(kernels: CpuKernels, name: str) -> None:
    moe = Moe(
        num_experts=4, num_experts_per_token=2, intermediate_size=64, routing="softmax_top_k", normalizes_top_k=True
    )
    gate_up, down = (
        stacked([quantized(name, shape) for _ in range(moe.num_experts)]) for shape in ((128, 96), (96, 64))
    )
    experts = StackedExperts(
        router=Linear(weight=torch.randn(4, 96)),
        num_experts=4,
        gate_up=Linear(weight=gate_up),
        down=Linear(weight=down, bias=torch.randn(4, 96)),
    )
    assert separated(experts) is experts
    assert separated(experts, lambda linear: None if linear.bias is not None else linear) is experts
    found = separated(experts, partial(stored_linear, kernels=kernels, rounds_inputs=False))
    assert isinstance(found, SeparateExperts)
    x = torch.randn(7, 96)
    choice = chosen_experts(torch.randn(7, 4), moe)
    expected = run_chosen_experts(x, experts, moe, choice)
    results = run_chosen_experts(x, found, moe, choice)
    assert (results - expected).abs().max() < 1e-6 * expected.abs().max()  # measured 4e-7


def stacked(weights: list[QuantizedWeight[Tensor]]) -> QuantizedWeight[Tensor]:
    parts = [weight.tensors() for weight in weights]
    return weights[0].map_tensors(lambda name, _: torch.stack([each[name] for each in parts]))
