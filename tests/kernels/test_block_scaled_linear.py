"""NVFP4 layers through PyTorch's block-scaled GEMM; on a CPU its definition stands in for it."""

# ruff: noqa: N803  (constants of a kernel are upper case)

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F  # noqa: N812

from dflash_trt.backends.cuda import nvfp4
from dflash_trt.backends.cuda.linear import Plain, apply_device_linear, prepare_device_linear
from dflash_trt.backends.cuda.nvfp4 import BlockScaledMatrix, tiled
from dflash_trt.formats.base import segment_amax
from dflash_trt.formats.registry import weight_format
from dflash_trt.kernels.packed_matrix import PackedMatrix
from dflash_trt.kernels.row_codes import NVFP4, NVFP4_TILED, scale_offsets
from dflash_trt.kernels.row_codes_launch import quantize_rows
from dflash_trt.network.ops import Linear
from tests.kernels.block_scales import row_by_row, scaled_mm_on_a_cpu, to_blocked
from tests.quantize.test_execution import SEGMENTS, defined_output, relative

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a definition stands in for the GEMM")
has_fp4_units = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
pytestmark = pytest.mark.usefixtures("exact_codes")
TOLERANCE = 1e-3  # float16 outputs; measured: 4.2e-4


@pytest.fixture
def block_scaled_gemm(monkeypatch):
    monkeypatch.setattr(nvfp4, "has_fp4_gemm", lambda device: True)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_on_a_cpu)


def quantized(rows=SEGMENTS, *, in_size=128, are_equal=True, input_amax=(3.0, 3.0, 3.0)):
    weight = torch.randn(sum(rows), in_size, generator=torch.Generator().manual_seed(1)) / 8
    ranges = segment_amax(weight, rows)
    ranges = ranges.amax().expand(len(rows)).clone() if are_equal else ranges
    amax = torch.tensor(input_amax[: len(rows)])
    return weight_format("nvfp4").quantize(weight, segments=rows, weight_amax=ranges, input_amax=amax)


def activations(num_rows, in_size=128):
    return 1.5 * torch.randn(num_rows, in_size, generator=torch.Generator().manual_seed(2))


def kinds(weight, dtype=torch.float16):
    return [type(matrix) for matrix in prepare_device_linear(Linear(weight=weight), dtype).weight.matrices]


@pytest.mark.parametrize(("rows", "blocks"), [(16, 4), (128, 8), (130, 12), (4096, 60)])
def test_block_scales_are_in_the_tiles_of_pytorch_s_reference(rows, blocks):
    scales = torch.randint(0, 127, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    found = tiled(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    assert torch.equal(found, to_blocked(scales))
    assert not torch.equal(found[: scales.numel()], scales.flatten())  # the negative control


@triton.jit
def offsets_kernel(out, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    rows, blocks = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCKS)[None, :]
    tl.store(out + rows * BLOCKS + blocks, scale_offsets(rows, blocks, BLOCKS, True))


def test_kernels_find_every_scale_in_such_tiles(device):
    offsets = torch.zeros(256, 8, dtype=torch.int32, device=device)
    offsets_kernel[(1,)](offsets, ROWS=256, BLOCKS=8)
    places = to_blocked(torch.arange(offsets.numel()).view(offsets.shape))
    assert torch.equal(offsets.flatten()[places.to(device)].cpu(), torch.arange(offsets.numel(), dtype=torch.int32))


def test_activations_have_the_same_codes_and_scales_in_tiles(device):
    x, scale = activations(35).to(device), torch.tensor([0.01], device=device)
    rows, tiles = (quantize_rows(x, form, scale) for form in (NVFP4, NVFP4_TILED))
    assert torch.equal(rows.values, tiles.values)
    assert torch.equal(row_by_row(tiles.block_scale.view(torch.uint8), 35), rows.block_scale.view(torch.uint8))


@on_a_cpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("input_amax", [(3.0, 3.0, 3.0), (1.0, 2.0, 3.0)])
def test_a_layer_computes_its_definition(block_scaled_gemm, input_amax, has_bias):
    weight, x = quantized(input_amax=input_amax), activations(5).half()
    bias = torch.linspace(-1, 1, 96).half() if has_bias else None
    linear = prepare_device_linear(Linear(weight=weight, bias=bias), torch.float16)
    assert [type(matrix) for matrix in linear.weight.matrices] == [BlockScaledMatrix] * len(set(input_amax))
    expected = defined_output(x.float(), weight, "nvfp4") + (0 if bias is None else bias)
    found = apply_device_linear(Plain(x), linear)
    assert relative(found, expected) < TOLERANCE
    matrices = [replace(matrix, block_scale=matrix.block_scale.roll(1)) for matrix in linear.weight.matrices]
    corrupted = replace(linear, weight=replace(linear.weight, matrices=tuple(matrices)))
    assert relative(apply_device_linear(Plain(x), corrupted), expected) > 10 * TOLERANCE


@on_a_cpu
def test_a_bias_in_float32_is_added_behind_the_gemm(block_scaled_gemm):
    weight, x, bias = quantized(), activations(5), torch.linspace(-1, 1, 96)
    linear = prepare_device_linear(Linear(weight=weight, bias=bias), torch.float32)
    assert relative(apply_device_linear(Plain(x), linear), defined_output(x, weight, "nvfp4") + bias) < 1e-6


@on_a_cpu
@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(quantized(in_size=80), id="no whole tiles of block scales"),
        pytest.param(quantized((40,)), id="output features"),
        pytest.param(quantized(are_equal=False), id="scales of segments"),
    ],
)
def test_what_the_gemm_does_not_take_goes_through_our_kernel(block_scaled_gemm, weight):
    assert kinds(weight, torch.float32) == [PackedMatrix]
    x = activations(5, in_size=2 * weight.codes.shape[1])
    found = apply_device_linear(Plain(x), prepare_device_linear(Linear(weight=weight), torch.float32))
    if len(weight.segments) == len(SEGMENTS):
        assert relative(found, defined_output(x, weight, "nvfp4")) < 1e-6
    assert kinds(quantized()) == [BlockScaledMatrix]  # the negative control


@pytest.mark.skipif(has_fp4_units, reason="for machines without FP4 units")
def test_without_units_for_it_a_layer_goes_through_our_kernel():
    assert kinds(quantized()) == [PackedMatrix]


@pytest.mark.gpu
@pytest.mark.skipif(not has_fp4_units, reason="needs a CUDA GPU of compute capability 10.0 or newer")
@pytest.mark.parametrize("num_rows", [5, 130])
def test_pytorch_s_gemm_computes_the_definition(num_rows, device):
    weight, x = quantized(), activations(num_rows).bfloat16()
    on_device = weight.map_tensors(lambda _, tensor: tensor.to(device))
    linear = prepare_device_linear(Linear(weight=on_device), torch.bfloat16)
    assert kinds(on_device, torch.bfloat16) == [BlockScaledMatrix]
    activation = Plain(x.to(device))
    found = apply_device_linear(activation, linear)
    assert relative(found.cpu(), defined_output(x.float(), weight, "nvfp4")) < 10 * TOLERANCE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = apply_device_linear(activation, linear)
    graph.replay()
    assert torch.equal(captured, found)
