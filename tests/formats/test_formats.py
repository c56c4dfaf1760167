"""Every format: its definition, written down once more and element by element."""

from collections.abc import Callable

import pytest
import torch

from dflash_trt.core.errors import CheckpointError
from dflash_trt.formats import int4, nvfp4
from dflash_trt.formats.base import QuantizedWeight, segment_amax, slice_quantized
from dflash_trt.formats.fp8 import Fp8RowWeight, Fp8Weight
from dflash_trt.formats.fp8_block import Fp8BlockWeight
from dflash_trt.formats.int4 import Int4Weight
from dflash_trt.formats.int8 import Int8Weight, token_codes
from dflash_trt.formats.mxfp4 import Mxfp4Weight
from dflash_trt.formats.nvfp4 import Nvfp4Weight
from dflash_trt.formats.registry import dequantize, format_of, format_with, weight_format, weight_formats

SEGMENTS = (200, 56, 128)  # of 2, 1 and 1 rows of blocks
COLUMNS = 160
FORMATS = sorted(weight_formats())
Weight = QuantizedWeight[torch.Tensor]


def plain(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[384, 160], its segments of very different magnitudes."""
    weight = torch.randn(sum(SEGMENTS), COLUMNS, generator=torch.Generator().manual_seed(0))
    magnitudes = torch.tensor([1.0, 0.01, 30.0]).repeat_interleave(torch.tensor(SEGMENTS))
    return (weight * magnitudes[:, None]).to(dtype)


def quantized(name: str, weight: torch.Tensor, segments: tuple[int, ...] = SEGMENTS) -> Weight:
    """With the ranges of the weights; those of the activations are twice as large."""
    known, ranges = weight_format(name), segment_amax(weight, segments)
    input_amax = 2 * ranges if known.has_input_scale else None
    return known.quantize(weight, segments=segments, weight_amax=ranges, input_amax=input_amax)


def fp8_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Fp8Weight)
    return weight.codes[n, k].float() * weight.weight_scale[segment_of(n)]


def segment_of(n: int) -> int:
    return (n >= 200) + (n >= 256)


def nibble(codes: torch.Tensor, n: int, k: int) -> int:
    return int(codes[n, k // 2]) >> (4 * (k % 2)) & 15


def e2m1(code: int) -> torch.Tensor:
    return torch.tensor((-1.0 if code & 8 else 1.0) * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7])


def nvfp4_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Nvfp4Weight)
    block = e2m1(nibble(weight.codes, n, k)) * weight.block_scale[n, k // 16].float()
    return block * weight.weight_scale[segment_of(n)]


def mxfp4_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Mxfp4Weight)
    return e2m1(nibble(weight.codes, n, k)) * 2.0 ** (int(weight.block_scale[n, k // 32]) - 127)


def fp8_row_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Fp8RowWeight)
    return weight.codes[n, k].float() * weight.weight_scale[n]


def fp8_block_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Fp8BlockWeight)
    block_row = n // 128 if n < 200 else 2 + (n >= 256)
    return weight.codes[n, k].float() * weight.block_scale[block_row, k // 128]


def int4_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Int4Weight)
    return torch.tensor(float(nibble(weight.codes, n, k) - 8)) * weight.block_scale[n, k // 32].float()


def int8_element(weight: Weight, n: int, k: int) -> torch.Tensor:
    assert isinstance(weight, Int8Weight)
    return weight.codes[n, k].float() * weight.weight_scale[n]


ELEMENTS: dict[str, Callable[[Weight, int, int], torch.Tensor]] = {
    "fp8": fp8_element,
    "fp8_block": fp8_block_element,
    "fp8_w8a16": fp8_row_element,
    "int4": int4_element,
    "int8": int8_element,
    "mxfp4": mxfp4_element,
    "nvfp4": nvfp4_element,
    "nvfp4_w4a16": nvfp4_element,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_dequantizes_by_its_definition(name: str) -> None:
    weight, element = quantized(name, plain()), ELEMENTS[name]
    found = dequantize(weight)
    for n, k in [(0, 0), (127, 127), (128, 128), (199, 159), (200, 5), (255, 159), (256, 127), (383, 128)]:
        assert found[n, k] == element(weight, n, k)


@pytest.mark.parametrize(
    ("name", "largest_error", "block"),
    [
        ("fp8", 2**-4, 1),
        ("fp8_w8a16", 2**-4, 1),
        ("fp8_block", 2**-4, 1),
        ("int4", 1 / 15 + 2**-8, 32),
        ("int8", 1 / 254, COLUMNS),
        ("mxfp4", 1 / 3, 32),
        ("nvfp4", (1 + 2**-4) / 6, 16),
    ],
)
def test_a_weight_errs_by_at_most_half_a_step(name: str, largest_error: float, block: int) -> None:
    """A step of E4M3 is an eighth of the value, one of INT4 two fifteenths of a block's range, in bfloat16. The largest
    step of E2M1 is a third of a block's range, whose scale E4M3 rounds, or two thirds, as powers of two round it.
    """
    weight = plain()
    error = (dequantize(quantized(name, weight)) - weight).abs()
    size = weight.abs().view(len(weight), -1, block).amax(-1).repeat_interleave(block, dim=1)
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


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_a_weight_of_many_rows_is_that_of_its_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, weight = quantized(name, plain()), plain()
    for module in (int4, nvfp4):
        monkeypatch.setattr(module, "_ROWS_AT_ONCE", 100)
    found = quantized(name, weight)
    for field, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[field].view(torch.uint8), tensor.view(torch.uint8)), field
    at_once = dequantize(found)
    monkeypatch.undo()
    assert torch.equal(at_once, dequantize(expected))


@pytest.mark.parametrize(("name", "largest"), [("fp8", 448), ("nvfp4", 448 * 6)])
def test_scales_are_ranges_over_the_largest_number(name: str, largest: float) -> None:
    weight, ranges = quantized(name, plain()), segment_amax(plain(), SEGMENTS)
    assert torch.equal(weight.weight_scale, ranges / largest) and torch.equal(weight.input_scale, 2 * ranges / largest)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("subject", ["weight", "activation"])
def test_a_range_that_is_none_is_refused(subject: str, value: float) -> None:
    ranges = {"weight": torch.ones(3), "activation": torch.ones(3)}
    ranges[subject][2] = value
    with pytest.raises(CheckpointError, match=f"{subject} ranges: expected finite and positive magnitudes"):
        weight_format("fp8").quantize(
            plain(), segments=SEGMENTS, weight_amax=ranges["weight"], input_amax=ranges["activation"]
        )


def test_bfloat16_weights_of_scaled_blocks_are_rounded_once() -> None:
    for name in ("fp8_block", "int4"):
        weight = quantized(name, plain())
        assert torch.equal(format_of(weight).unscaled(weight, torch.bfloat16), dequantize(weight).bfloat16())


def test_a_block_of_zeros_in_int4_has_the_scale_and_the_codes_of_its_compressor() -> None:
    weight = quantized("int4", torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1), (1,))
    assert isinstance(weight, Int4Weight)
    assert float(weight.block_scale[0, 1]) == 2.0**-7 and set(weight.codes[0, 16:].tolist()) == {0x88}


def test_the_even_column_of_int4_is_the_low_nibble() -> None:
    codes = torch.full((1, 16), 0x88, dtype=torch.uint8)
    codes[0, 0] = 0xF1  # -7, 7
    weight = Int4Weight(segments=(1,), codes=codes, block_scale=torch.ones(1, 1, dtype=torch.bfloat16))
    assert dequantize(weight)[0, :3].tolist() == [-7.0, 7.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_int8_is_rounded_to_even_with_its_own_scale(dtype: torch.dtype) -> None:
    x = torch.tensor([[-127.0, 0.5, 1.5, -2.5, 64.0], [0.0, 0.0, 0.0, 0.0, 0.0], [2.0**-140, 0.0, 3.0, -3.0, 1.0]])
    codes, scale = token_codes(x.to(dtype))
    assert codes.tolist() == [[-127, 0, 2, -2, 64], [0] * 5, [0, 0, 127, -127, 42]]
    assert scale.flatten().tolist() == [1.0, 2.0**-126, float(torch.tensor(3.0) / 127)]


def test_tokens_of_int8_that_are_tiny_or_not_finite_have_scales_that_say_so() -> None:
    codes, scale = token_codes(torch.tensor([[2.0**-130, -(2.0**-126)], [torch.inf, 1.0], [torch.nan, 1.0]]))
    assert codes[0].tolist() == [0, -1]
    assert not bool((scale[1:] * codes[1:].sum(dim=1, keepdim=True)).isfinite().any())


TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]  # between two numbers of E2M1, and its largest


def test_ties_of_nvfp4_go_to_even_codes_and_those_of_mxfp4_to_the_smaller_number() -> None:
    """Of blocks whose range is 6, so that their scales are 1."""
    values = torch.tensor([TIES * 2 + [-x for x in TIES * 2]])
    codes = nvfp4.e2m1_codes(torch.tensor([*TIES, 7.0, -0.3, -9.0]))
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 8 + 1, 8 + 7]
    smaller = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.equal(dequantize(quantized("mxfp4", values, (1,)))[0, :8], smaller)
    assert torch.equal(dequantize(quantized("mxfp4", values * 2.0**-9, (1,)))[0, 16:24], -smaller * 2.0**-9)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "nvfp4_w4a16"])
def test_values_beyond_their_range_are_its_end(name: str) -> None:
    known, weight = weight_format(name), plain()[:200]
    ranges = segment_amax(weight, (200,)) / 4
    found = known.quantize(
        weight, segments=(200,), weight_amax=ranges, input_amax=ranges if known.has_input_scale else None
    )
    largest = dequantize(found).abs().max()
    assert 0.9 * ranges < largest <= ranges * (1 + 1e-6)


def test_blocks_far_below_the_range_keep_the_smallest_scale() -> None:
    scale = torch.tensor(1.0)
    blocks = torch.tensor([[1e-6] * 16, [0.0] * 16, [6.0] * 16, [6e5] * 16])
    assert nvfp4.block_scales(blocks, scale).float().tolist() == [2.0**-9, 1.0, 1.0, 448.0]
