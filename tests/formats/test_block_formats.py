"""FP8 per channel and in blocks, and INT4: their definitions, written down once more and element by element."""

from collections.abc import Callable

import pytest
import torch

from dflash_trt.formats.base import QuantizedWeight, segment_amax, slice_quantized
from dflash_trt.formats.fp8 import Fp8RowWeight
from dflash_trt.formats.fp8_block import Fp8BlockWeight
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.registry import dequantize, format_of, format_with, weight_format

SEGMENTS = (200, 56, 128)  # of 2, 1 and 1 rows of blocks
COLUMNS = 160
FORMATS = ["fp8_w8a16", "fp8_block", "int4"]
Weight = QuantizedWeight[torch.Tensor]


def plain(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[384, 160], its segments of very different magnitudes."""
    weight = torch.randn(sum(SEGMENTS), COLUMNS, generator=torch.Generator().manual_seed(0))
    magnitudes = torch.tensor([1.0, 0.01, 30.0]).repeat_interleave(torch.tensor(SEGMENTS))
    return (weight * magnitudes[:, None]).to(dtype)


def quantized(name: str, weight: torch.Tensor, segments: tuple[int, ...] = SEGMENTS) -> Weight:
    ranges = segment_amax(weight, segments)
    return weight_format(name).quantize(weight, segments=segments, weight_amax=ranges, input_amax=None)


def fp8_row_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Fp8RowWeight)
    return weight.codes[n, k].float() * weight.weight_scale[n]


def fp8_block_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Fp8BlockWeight)
    block_row = n // 128 if n < 200 else 2 + (n >= 256)
    return weight.codes[n, k].float() * weight.block_scale[block_row, k // 128]


def int4_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Int4Weight)
    nibble = int(weight.codes[n, k // 2]) >> (4 * (k % 2)) & 15
    return torch.tensor(float(nibble - 8)) * weight.block_scale[n, k // 32].float()


@pytest.mark.parametrize(
    ("name", "element"), [("fp8_w8a16", fp8_row_element), ("fp8_block", fp8_block_element), ("int4", int4_element)]
)
def test_a_weight_dequantizes_by_its_definition(name: str, element: Callable[[Weight, int, int], torch.Tensor]) -> None:
    weight = quantized(name, plain())
    found = dequantize(weight)
    for n, k in [(0, 0), (127, 127), (128, 128), (199, 159), (200, 5), (255, 159), (256, 127), (383, 128)]:
        assert found[n, k] == element(weight, n, k)


@pytest.mark.parametrize(
    ("name", "largest_error"), [("fp8_w8a16", 2**-4), ("fp8_block", 2**-4), ("int4", 1 / 15 + 2**-8)]
)
def test_a_weight_errs_by_at_most_half_a_step(name: str, largest_error: float) -> None:
    """A step of E4M3 is an eighth of the value, one of INT4 two fifteenths of a block's range, in bfloat16."""
    weight = plain()
    error = (dequantize(quantized(name, weight)) - weight).abs()
    size = weight.abs()
    if name == "int4":
        size = size.view(len(weight), -1, 32).amax(-1).repeat_interleave(32, dim=1)
    smallest = weight.abs().amax() * 2.0**-18  # subnormal codes
    assert bool((error <= torch.maximum(size * largest_error, smallest) * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_have_the_dtypes_and_shapes_of_the_layout(name: str) -> None:
    weight = quantized(name, plain())
    layout = weight_format(name).layout((sum(SEGMENTS), COLUMNS), SEGMENTS)
    tensors = weight.tensors()
    assert list(tensors) == list(layout)
    for field, tensor in tensors.items():
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{layout[field].dtype}", layout[field].shape)
    assert format_of(weight).name == name
    assert format_with(tensors).name == name


@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_of_whole_segments_dequantizes_to_the_rows_it_stands_for(name: str) -> None:
    weight = quantized(name, plain())
    part = slice_quantized(weight, 200, 384, lambda x, start, stop: x[start:stop])
    assert part.segments == SEGMENTS[1:]
    assert torch.equal(dequantize(part), dequantize(weight)[200:])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_quantized_one_by_one(name: str) -> None:
    first = plain()
    both = torch.stack((first, first.flip(0)))
    stacked = quantized(name, both, (384,))
    assert torch.equal(dequantize(stacked)[1], dequantize(quantized(name, first.flip(0), (384,))))


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_of_zeros_is_zero(name: str) -> None:
    weight = plain()
    weight[256:384, 128:] = 0.0
    weight[3] = 0.0
    found = dequantize(quantized(name, weight))
    assert not bool(found[256:384, 128:].any()) and not bool(found[3].any())
    assert bool(found.isfinite().all())


def test_bfloat16_weights_of_scaled_blocks_are_rounded_once() -> None:
    for name in ("fp8_block", "int4"):
        weight = quantized(name, plain())
        assert torch.equal(format_of(weight).unscaled(weight, torch.bfloat16), dequantize(weight).bfloat16())


def test_the_even_column_of_int4_is_the_low_nibble() -> None:
    codes = torch.full((1, 16), 0x88, dtype=torch.uint8)
    codes[0, 0] = 0xF1  # -7, 7
    weight = Int4Weight(segments=(1,), codes=codes, block_scale=torch.ones(1, 1, dtype=torch.bfloat16))
    assert dequantize(weight)[0, :3].tolist() == [-7.0, 7.0, 0.0]
