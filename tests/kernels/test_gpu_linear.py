"""Linears prepared for a GPU against the definition of the formats; a CPU emulates the FP8 product."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.cuda.linear import (
    ACTIVATIONS,
    WEIGHT_ONLY,
    DeviceFp8Weight,
    DeviceInt8Weight,
    DevicePackedWeight,
    Plain,
    apply_device_linear,
    prepare_device_linear,
)
from dflash_trt.backends.graphs import waits_raise
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import dequantize as dequantized
from dflash_trt.formats.registry import weight_format as known_format
from dflash_trt.formats.registry import weight_formats
from dflash_trt.kernels import int8_linear_launch, packed_linear_launch, row_codes_launch
from dflash_trt.network.ops import Linear
from tests.kernels_on import KERNELS_ON
from tests.quantize.test_execution import BFLOAT16_TOLERANCE, activations, defined_output, relative

SEGMENTS = (32, 16, 48)
pytestmark = pytest.mark.usefixtures("exact_codes")
FORMATS = sorted(name for name, known in weight_formats().items() if known.weight_type in (*ACTIVATIONS, *WEIGHT_ONLY))
# float32 sums in another order: measured on a CPU, 3.7e-7. FP8 units of an H200 keep the bound, too.
SUM_TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-6


def quantized_weight(weight_format, *, input_amax=(3.0, 3.0, 3.0), are_equal=False):
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    ranges = segment_amax(weight, SEGMENTS)
    if are_equal:
        ranges = ranges.amax().expand(3).clone()
    known = known_format(weight_format)
    amax = torch.tensor(input_amax) if known.has_input_scale else None
    return known.quantize(weight, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)


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
    kind = {"fp8": DeviceFp8Weight, "int8": DeviceInt8Weight}.get(weight_format, DevicePackedWeight)
    assert isinstance(prepared, kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_format", [name for name in FORMATS if known_format(name).is_weight_only])
def test_a_loop_over_many_inputs_computes_the_definition(weight_format, dtype, device):
    """Long enough that loads and products of several rounds are on their way at once; all codes of a format occur."""
    if dtype == torch.bfloat16 and KERNELS_ON == "interpreter":
        pytest.skip("the interpreter is not exact in bfloat16")
    weight = 0.05 * torch.randn(192, 512, generator=torch.Generator().manual_seed(1))
    known = known_format(weight_format)
    quantized = known.quantize(weight, segments=(192,), weight_amax=segment_amax(weight, (192,)), input_amax=None)
    for num_rows in (3, 70):
        x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
        _, found = run(quantized, x, device)
        expected = x.double() @ dequantized(quantized).to(dtype).double().T
        assert relative(found.double(), expected) < {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize(("segments", "in_size"), [((24, 16, 16), 64), ((32, 16, 48), 72)])
def test_fp8_layers_of_sizes_that_no_fp8_gemm_takes_stay_packed(segments, in_size, device):
    weight = torch.randn(sum(segments), in_size, generator=torch.Generator().manual_seed(1))
    scales = {"weight_amax": segment_amax(weight, segments), "input_amax": torch.full((3,), 3.0)}
    quantized = known_format("fp8").quantize(weight, segments=segments, **scales)
    x = 1.5 * torch.randn(7, in_size, generator=torch.Generator().manual_seed(2))
    prepared, found = run(quantized, x, device)
    assert isinstance(prepared, DevicePackedWeight)
    codes = (x / quantized.input_scale[0]).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    expected = codes * quantized.input_scale[0] @ dequantized(quantized).double().T
    assert relative(found, expected) < SUM_TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_another_scale_gives_another_output(weight_format, device):
    """The negative control."""
    weight, x = quantized_weight(weight_format), activations()
    expected = defined_output(x, weight, weight_format)
    if weight.weight_scale is not None:
        weight.weight_scale[1] *= 1.1
    elif weight.block_scale.is_floating_point():
        weight.block_scale[1] *= 1.1
    else:
        weight.block_scale[1] += 1
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

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        assert {x.device.type for x in tensors} <= {"meta"}, func
        return func(*args, **(kwargs or {}))


class Launches:
    """Stands in for a kernel, which has nothing to read on "meta"; counts."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            assert {x.device.type for x in args if isinstance(x, torch.Tensor)} == {"meta"}
            self.count += 1

        return launch


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_layer_takes_one_gemm_and_one_quantization_without_a_word_to_the_host(weight_format, monkeypatch):
    gemm, quantizations = Launches(), Launches()
    monkeypatch.setattr(packed_linear_launch, "packed_linear_kernel", gemm)
    monkeypatch.setattr(int8_linear_launch, "int8_linear_kernel", gemm)
    monkeypatch.setattr(int8_linear_launch, "token_codes_kernel", quantizations)
    monkeypatch.setattr(row_codes_launch, "quantize_rows_kernel", quantizations)
    monkeypatch.setattr(row_codes_launch, "quantize_fp8_kernel", quantizations)
    prepared = prepare_device_linear(Linear(weight=quantized_weight(weight_format, are_equal=True)), torch.bfloat16)
    x = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    linear = on_meta(prepared)
    with NoHost() as seen:
        assert apply_device_linear(Plain(x), linear).shape == (5, 96)
        scaled_mms = sum("_scaled_mm" in name for name in seen.names)
        with pytest.raises(AssertionError):  # the negative control
            x * torch.ones(())
    assert gemm.count + scaled_mms == 1
    assert quantizations.count == (not known_format(weight_format).is_weight_only)


def on_meta(value):
    """Every tensor of a prepared layer."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(on_meta(item) for item in value)
    if is_dataclass(value):
        return replace(value, **{item.name: on_meta(getattr(value, item.name)) for item in fields(value)})
    return value


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
