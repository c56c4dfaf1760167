"""Linears prepared for a GPU against the definition of the formats; a CPU emulates the FP8 product."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.cuda.linear import (
    DeviceFp8Weight,
    DeviceInt4Weight,
    Plain,
    apply_device_linear,
    prepare_device_linear,
)
from dflash_trt.backends.graphs import waits_raise
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import weight_format as known_format
from dflash_trt.network.ops import Linear
from tests.quantize.test_execution import BFLOAT16_TOLERANCE, activations, defined_output, relative

SEGMENTS = (32, 16, 48)
FORMATS = ["fp8", "nvfp4", "nvfp4_w4a16"]
# float32 sums in another order: measured on a CPU, 3.7e-7. FP8 units sum with fewer bits: not measured on a GPU.
SUM_TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-6


def quantized_weight(weight_format, *, input_amax=(3.0, 3.0, 3.0), are_equal=False):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    ranges = segment_amax(weight, SEGMENTS)
    if are_equal:
        ranges = ranges.amax().expand(3).clone()
    amax = None if weight_format == "nvfp4_w4a16" else torch.tensor(input_amax)
    return known_format(weight_format).quantize(weight, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)


def moved(weight, device):
    fields = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    tensors = {name: value.to(device) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return replace(weight, **tensors)


def run(weight, x, device, bias=None):
    """On the device, back to the host."""
    bias = None if bias is None else bias.to(device)
    prepared = prepare_device_linear(Linear(weight=moved(weight, device), bias=bias), x.dtype)
    return prepared.weight, apply_device_linear(Plain(x.to(device)), prepared).cpu()


@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("input_amax", [(3.0, 3.0, 3.0), (3.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_prepared_linear_computes_its_definition(weight_format, input_amax, are_equal, device):
    weight, x = quantized_weight(weight_format, input_amax=input_amax, are_equal=are_equal), activations()
    prepared, found = run(weight, x, device)
    assert relative(found, defined_output(x, weight, weight_format)) < SUM_TOLERANCE
    kind = {"fp8": DeviceFp8Weight, "nvfp4_w4a16": DeviceInt4Weight}.get(weight_format)
    assert kind is None or isinstance(prepared, kind)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_another_scale_gives_another_output(weight_format, device):
    """The negative control."""
    weight, x = quantized_weight(weight_format), activations()
    expected = defined_output(x, weight, weight_format)
    weight.weight_scale[1] *= 1.1
    assert relative(run(weight, x, device)[1], expected) > 5 * SUM_TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_bias_is_added_after_the_scales(weight_format, device):
    weight, x, bias = quantized_weight(weight_format), activations(), torch.linspace(-1, 1, 96)
    plain, biased = (run(weight, x, device, bias=b)[1] for b in (None, bias))
    torch.testing.assert_close(biased, plain + bias)


def test_plain_weights_are_left_alone(device):
    linear = Linear(weight=torch.randn(8, 16, device=device), bias=torch.randn(8, device=device))
    x = torch.randn(3, 16, device=device)
    assert prepare_device_linear(linear, torch.float32) is linear
    torch.testing.assert_close(apply_device_linear(Plain(x), linear), x @ linear.weight.T + linear.bias)


class NoHost(TorchDispatchMode):
    """Raises where a tensor of the host meets one of the device, which here is "meta": it has no content to read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        assert {x.device.type for x in tensors} <= {"meta"}, func
        return func(*args, **(kwargs or {}))


def test_4_bit_weights_are_multiplied_without_a_word_to_the_host():
    prepared = prepare_device_linear(Linear(weight=quantized_weight("nvfp4_w4a16")), torch.bfloat16)
    linear, x = Linear(weight=moved(prepared.weight, "meta")), torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    with NoHost():
        assert apply_device_linear(Plain(x), linear).shape == (5, 96)
        with pytest.raises(AssertionError):  # the negative control
            x * torch.ones(())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: graphs")
@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4_w4a16"])
def test_a_linear_of_a_format_that_a_gpu_opens_can_be_captured(weight_format, device):
    weight, x = quantized_weight(weight_format), activations().bfloat16().to(device)
    prepared = prepare_device_linear(Linear(weight=moved(weight, device)), x.dtype)
    with waits_raise():
        expected = apply_device_linear(Plain(x), prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = apply_device_linear(Plain(x), prepared)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: bfloat16 activations")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_bfloat16_adds_no_error_but_that_of_its_outputs(weight_format, device):
    weight, x = quantized_weight(weight_format), activations().bfloat16()
    found = run(weight, x, device)[1]
    assert relative(found, defined_output(x.float(), weight, weight_format)) < BFLOAT16_TOLERANCE
