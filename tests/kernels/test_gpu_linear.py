"""Linears prepared for a GPU against the definition of the formats; a CPU emulates the FP8 product."""

import pytest
import torch

from dflash_trt.network.ops import Linear
from dflash_trt.network.torch_gpu_linear import (
    DeviceFp8Weight,
    DeviceInt4Weight,
    Plain,
    apply_device_linear,
    prepare_device_linear,
)
from dflash_trt.quantize.pack import pack, segment_amax
from tests.quantize.test_execution import BFLOAT16_TOLERANCE, activations, defined_output, relative

SEGMENTS = (32, 16, 48)
FORMATS = ["fp8", "nvfp4", "nvfp4_w4a16"]
# float32 sums in another order: measured on a CPU, 3.7e-7. FP8 units sum with fewer bits: not measured on a GPU.
SUM_TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-6


def packed_weight(weight_format, *, input_amax=(3.0, 3.0, 3.0), are_equal=False):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    ranges = segment_amax(weight, SEGMENTS)
    if are_equal:
        ranges = ranges.amax().expand(3).clone()
    amax = None if weight_format == "nvfp4_w4a16" else torch.tensor(input_amax)
    return pack(weight, weight_format, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)


def run(weight, x, device, bias=None):
    """On the device, back to the host."""
    fields = {name: getattr(weight, name) for name in type(weight).__dataclass_fields__}
    moved = type(weight)(
        **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
    )
    prepared = prepare_device_linear(Linear(weight=moved, bias=None if bias is None else bias.to(device)), x.dtype)
    return prepared.weight, apply_device_linear(Plain(x.to(device)), prepared).cpu()


@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("input_amax", [(3.0, 3.0, 3.0), (3.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_prepared_linear_computes_its_definition(weight_format, input_amax, are_equal, device):
    weight, x = packed_weight(weight_format, input_amax=input_amax, are_equal=are_equal), activations()
    prepared, found = run(weight, x, device)
    assert relative(found, defined_output(x, weight, weight_format)) < SUM_TOLERANCE
    kind = {"fp8": DeviceFp8Weight, "nvfp4_w4a16": DeviceInt4Weight}.get(weight_format)
    assert kind is None or isinstance(prepared, kind)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_another_scale_gives_another_output(weight_format, device):
    """The perturbed twin."""
    weight, x = packed_weight(weight_format), activations()
    expected = defined_output(x, weight, weight_format)
    weight.weight_scale[1] *= 1.1
    assert relative(run(weight, x, device)[1], expected) > 5 * SUM_TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_bias_is_added_after_the_scales(weight_format, device):
    weight, x, bias = packed_weight(weight_format), activations(), torch.linspace(-1, 1, 96)
    plain, biased = (run(weight, x, device, bias=b)[1] for b in (None, bias))
    torch.testing.assert_close(biased, plain + bias)


def test_plain_weights_are_left_alone(device):
    linear = Linear(weight=torch.randn(8, 16, device=device), bias=torch.randn(8, device=device))
    x = torch.randn(3, 16, device=device)
    assert prepare_device_linear(linear, torch.float32) is linear
    torch.testing.assert_close(apply_device_linear(Plain(x), linear), x @ linear.weight.T + linear.bias)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: bfloat16 activations")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_bfloat16_adds_no_error_but_that_of_its_outputs(weight_format, device):
    weight, x = packed_weight(weight_format), activations().bfloat16()
    found = run(weight, x, device)[1]
    assert relative(found, defined_output(x.float(), weight, weight_format)) < BFLOAT16_TOLERANCE
