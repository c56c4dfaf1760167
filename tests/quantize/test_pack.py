"""The formats of `formats/base.py`, against their definitions and against PyTorch's own float8."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.core.errors import CheckpointError
from dflash_trt.formats.base import segment_amax, slice_quantized
from dflash_trt.formats.fp8 import Fp8Weight, e4m3
from dflash_trt.formats.nvfp4 import Nvfp4Weight, e2m1_codes, e2m1_values
from dflash_trt.formats.registry import dequantize
from dflash_trt.formats.registry import weight_format as known_format

SEGMENTS = (48, 16, 32)


def random_weight(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[96, 64], its segments of very different magnitudes."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(seed))
    weight *= torch.tensor([1.0, 0.01, 30.0]).repeat_interleave(torch.tensor(SEGMENTS))[:, None]
    return weight.to(dtype)


def quantized(weight: torch.Tensor, weight_format: str, *, input_amax: float = 3.0):
    amax = None if weight_format == "nvfp4_w4a16" else torch.full((3,), input_amax)
    ranges = segment_amax(weight, SEGMENTS)
    return known_format(weight_format).quantize(weight, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)


@settings(deadline=None)
@given(st.floats(min_value=-8, max_value=8, width=32))
def test_e2m1_rounds_to_the_nearest_value_and_ties_to_the_even_code(value: float) -> None:
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    x = min(abs(value), 6.0)
    nearest = min(range(8), key=lambda i: (abs(magnitudes[i] - x), i % 2))
    code = int(e2m1_codes(torch.tensor([value]))[0])
    assert code & 7 == nearest
    assert code >> 3 == (value < 0)


def test_every_tie_of_e2m1_goes_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_codes(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1_codes(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_the_even_column_is_the_low_nibble() -> None:
    values = e2m1_values(torch.tensor([[0x21, 0xF7]], dtype=torch.uint8))
    assert values.tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_e4m3_saturates() -> None:
    assert e4m3(torch.tensor([1e9, -1e9, 449.0])).float().tolist() == [448.0, -448.0, 448.0]


def test_fp8_stores_one_scale_per_segment_and_errs_by_at_most_half_a_step() -> None:
    weight = random_weight()
    result = quantized(weight, "fp8")
    assert isinstance(result, Fp8Weight)
    assert torch.equal(result.weight_scale, segment_amax(weight, SEGMENTS) / 448)
    error = (dequantize(result) - weight).abs()
    # E4M3 has 3 mantissa bits: half a step is 2**-4 of the value, or half of 2**-9 scales below the normal range.
    smallest = result.weight_scale.repeat_interleave(torch.tensor(SEGMENTS))[:, None] * 2.0**-10
    assert bool((error <= torch.maximum(weight.abs() * 2.0**-4, smallest) * (1 + 1e-6)).all())


def test_nvfp4_dequantizes_by_its_definition() -> None:
    weight = random_weight()
    result = quantized(weight, "nvfp4_w4a16")
    assert isinstance(result, Nvfp4Weight)
    assert result.input_scale is None
    assert result.codes.shape == (96, 32) and result.block_scale.shape == (96, 4)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = dequantize(result)
    for n, k in [(0, 0), (5, 33), (47, 63), (48, 1), (70, 30), (95, 62)]:
        code = int(result.codes[n, k // 2]) >> (4 * (k % 2)) & 15
        segment = next(s for s in range(3) if n < sum(SEGMENTS[: s + 1]))
        value = torch.tensor((-1 if code & 8 else 1) * table[code & 7])
        assert found[n, k] == value * result.block_scale[n, k // 16].float() * result.weight_scale[segment]


def test_nvfp4_of_a_block_of_zeros_is_zero() -> None:
    weight = random_weight()
    weight[3, 16:32] = 0.0
    assert dequantize(quantized(weight, "nvfp4_w4a16"))[3, 16:32].tolist() == [0.0] * 16


def test_nvfp4_errs_by_at_most_a_sixth_of_its_block() -> None:
    weight = random_weight()
    error = (dequantize(quantized(weight, "nvfp4_w4a16")) - weight).abs().view(96, 4, 16).amax(-1)
    largest = weight.abs().view(96, 4, 16).amax(-1)
    # The widest gap of E2M1 is from 4 to 6: half of it is 1/6 of the block's range. E4M3 block scales add 2**-4.
    assert bool((error <= largest * (1 / 6 + 2.0**-4)).all())


def test_a_slice_of_whole_segments_dequantizes_to_the_rows_it_stands_for() -> None:
    for weight_format in ("fp8", "nvfp4"):
        result = quantized(random_weight(), weight_format)
        part = slice_quantized(result, 48, 96, lambda x, start, stop: x[start:stop])
        assert part.segments == SEGMENTS[1:]
        assert torch.equal(dequantize(part), dequantize(result)[48:])


def test_a_slice_through_a_segment_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="cut a segment"):
        slice_quantized(quantized(random_weight(), "fp8"), 0, 50, lambda x, start, stop: x[start:stop])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("which", ["weight", "activation"])
def test_a_range_that_is_no_range_is_refused(wrong: float, which: str) -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, wrong, 1.0])
    ranges = {"weight_amax": good, "input_amax": good}
    ranges["weight_amax" if which == "weight" else "input_amax"] = bad
    with pytest.raises(CheckpointError, match=f"{which} ranges: expected finite and positive"):
        known_format("fp8").quantize(random_weight(), segments=SEGMENTS, **ranges)
