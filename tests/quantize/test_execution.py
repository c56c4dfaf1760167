"""Quantized linears and FP8 pages as the torch backend runs them, against the definition in `formats/base.py`."""

import pytest
import torch

from dflash_trt.backends.torch import int8_linear
from dflash_trt.backends.torch.attention import read_pages, write_pages
from dflash_trt.backends.torch.attention_plan import PageSlots, QueryGroup, Scratch
from dflash_trt.backends.torch.quantized_linear import apply_quantized, prepare_linear
from dflash_trt.core.quantization import LayerKvScales, QuantizationSpec
from dflash_trt.formats.base import QuantizedWeight, segment_amax
from dflash_trt.formats.int8 import MAX_COLUMNS, Int8Weight
from dflash_trt.formats.registry import dequantize
from dflash_trt.formats.registry import weight_format as known_format
from dflash_trt.network.ops import Linear
from tests.caches import cache_of
from tests.engines import decode, make_executor

SEGMENTS = (32, 16, 48)
FORMATS = ["fp8", "int8", "nvfp4", "nvfp4_w4a16"]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# The float32 sums of a GEMM come in another order; measured on this test: 1.8e-7 relative to the largest output.
SUM_TOLERANCE = 1e-6
# bfloat16 rounds the product and the scaled product once each, 2**-9 relative to each output; measured: 0.0058.
BFLOAT16_TOLERANCE = 0.01


def quantized_weight(
    weight_format: str, *, input_amax: tuple[float, ...] = (3.0, 3.0, 3.0)
) -> QuantizedWeight[torch.Tensor]:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    amax = torch.tensor(input_amax) if known_format(weight_format).has_input_scale else None
    ranges = segment_amax(weight, SEGMENTS)
    return known_format(weight_format).quantize(weight, segments=SEGMENTS, weight_amax=ranges, input_amax=amax)  # type: ignore[arg-type]


def activations() -> torch.Tensor:  # [7, 64], with values beyond the calibrated range
    return 1.5 * torch.randn(7, 64, generator=torch.Generator().manual_seed(2))


def quantized(x: torch.Tensor, weight_format: str, scale: float | None) -> torch.Tensor:
    """x_s of the definition, written down once more, value by value."""
    if weight_format == "int8":
        row_scale = x.abs().amax(dim=1, keepdim=True) / 127
        return torch.tensor([[round(v) for v in row] for row in (x / row_scale).tolist()]) * row_scale.double()
    if scale is None:
        return x
    if weight_format == "fp8":
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    blocks = x.view(len(x), -1, 16)
    block_scale = (blocks.abs().amax(-1) / (6 * scale)).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()[..., None]
    ratio = blocks / (block_scale * scale)
    distance = (ratio.abs()[..., None].clamp(max=6).double() - E2M1).abs()
    distance = distance + torch.tensor([0.0, 1e-12], dtype=torch.float64).repeat(4)  # ties to the even index
    return (E2M1[distance.argmin(-1)] * ratio.sign() * block_scale * scale).view_as(x)


def defined_output(x: torch.Tensor, weight: QuantizedWeight[torch.Tensor], weight_format: str) -> torch.Tensor:
    rows = torch.split(dequantize(weight).double(), SEGMENTS)
    scales = [None] * 3 if weight.input_scale is None else weight.input_scale.tolist()
    seen = [quantized(x, weight_format, scale) for scale in scales]
    return torch.cat([(a.double() @ w.T) for a, w in zip(seen, rows, strict=True)], dim=1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("input_amax", [(3.0, 3.0, 3.0), (3.0, 1.0, 1.0), (1.0, 2.0, 3.0)])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_quantized_linear_computes_its_definition(weight_format: str, input_amax: tuple[float, ...]) -> None:
    weight, x = quantized_weight(weight_format, input_amax=input_amax), activations()
    linear = prepare_linear(Linear(weight=weight), torch.float32)
    assert relative(apply_quantized(x, linear), defined_output(x, weight, weight_format)) < SUM_TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_bfloat16_adds_no_error_but_that_of_its_outputs(weight_format: str) -> None:
    weight, x = quantized_weight(weight_format), activations().bfloat16()
    found = apply_quantized(x, prepare_linear(Linear(weight=weight), torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert relative(found, defined_output(x.float(), weight, weight_format)) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("weight_format", FORMATS)
def test_another_scale_gives_another_output(weight_format: str) -> None:
    """The negative control: half the first segment's weight scale."""
    weight, x = quantized_weight(weight_format), activations()
    expected = defined_output(x, weight, weight_format)
    weight.weight_scale[0] *= 0.5
    found = apply_quantized(x, prepare_linear(Linear(weight=weight), torch.float32))
    assert relative(found, expected) > 1000 * SUM_TOLERANCE


def test_a_bias_is_added_after_the_scales() -> None:
    weight, x = quantized_weight("fp8"), activations()
    bias = torch.linspace(-1, 1, 96)
    plain, biased = (
        apply_quantized(x, prepare_linear(Linear(weight=weight, bias=b), torch.float32)) for b in (None, bias)
    )
    assert torch.equal(biased, plain + bias)


def int8_weight(num_out: int, num_in: int) -> Int8Weight[torch.Tensor]:
    """As in a checkpoint, where -128 occurs."""
    codes = torch.randint(-128, 128, (num_out, num_in), generator=torch.Generator().manual_seed(3)).to(torch.int8)
    return Int8Weight(segments=(num_out,), codes=codes, weight_scale=torch.linspace(0.01, 0.03, num_out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
@pytest.mark.parametrize("num_in", [37, 3000])
def test_int8_gives_the_bits_of_its_definition(num_in: int, num_rows: int, dtype: torch.dtype) -> None:
    weight, bias = int8_weight(45, num_in), torch.linspace(-1, 1, 45).to(dtype)
    x = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    found = apply_quantized(x, prepare_linear(Linear(weight=weight, bias=bias), dtype))
    scale = x.float().abs().amax(dim=1, keepdim=True) / 127 if num_rows else torch.ones(0, 1)
    sums = (x.float() / scale).round().double() @ weight.codes.double().T
    assert torch.equal(found, (sums.float() * weight.weight_scale * scale + bias.float()).to(dtype))


@pytest.mark.parametrize("has_int_mm", [True, False])
def test_sums_of_int8_are_exact_at_their_largest(has_int_mm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_int_mm:
        monkeypatch.setattr(int8_linear, "_is_int_mm_exact", lambda: False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(120, 128, (2, MAX_COLUMNS), generator=generator)  # float32 does not hold their odd sums
    weight = torch.randint(-128, -120, (8, MAX_COLUMNS), generator=generator)
    x[0], weight[0] = 127, -128
    found = int8_linear.int32_product(x.to(torch.int8), weight.to(torch.int8))
    assert found.dtype == torch.int32 and torch.equal(found.double(), x.double() @ weight.double().T)


def test_an_int8_product_that_saturates_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of oneDNN without VNNI, which adds pairs in 16 bits."""

    def saturating(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        products = (x.int()[:, :, None] * weight.int()).unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
        return products.sum(1, dtype=torch.int32)

    weight, x = int8_weight(8, 64), 127 * torch.ones(3, 64)
    expected = apply_quantized(x, Linear(weight=weight))
    int8_linear._is_int_mm_exact.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", saturating)
    try:
        assert torch.equal(apply_quantized(x, Linear(weight=weight)), expected)
    finally:
        int8_linear._is_int_mm_exact.cache_clear()


def test_fp8_pages_hold_rounded_keys_and_values() -> None:
    pages = torch.zeros(3, 2, 4, 2, 16, dtype=torch.float8_e4m3fn)
    scaled = cache_of(pages, LayerKvScales(k=0.01, v=0.02))
    k, v = torch.randn(2, 5, 2, 16, generator=torch.Generator().manual_seed(0))
    # Page 2 then page 0: positions 0 .. 3 and 4; a page holds its keys before its values.
    slots = torch.tensor([16, 17, 18, 19, 0])
    write_pages(scaled, PageSlots(slots, slots + 4), k, v)
    group = QueryGroup(rows=None, positions=torch.tensor([[4]]), page_ids=torch.tensor([[2, 0]]), num_keys=5)
    read_k, read_v = read_pages(scaled, group, torch.float32, Scratch())
    assert torch.equal(read_k[0].transpose(0, 1), (k / 0.01).to(torch.float8_e4m3fn).float() * 0.01)
    assert torch.equal(read_v[0].transpose(0, 1), (v / 0.02).to(torch.float8_e4m3fn).float() * 0.02)


def test_fp8_pages_saturate_instead_of_losing_a_value() -> None:
    pages = torch.zeros(1, 2, 4, 1, 16, dtype=torch.float8_e4m3fn)
    scaled = cache_of(pages, LayerKvScales(k=0.001, v=0.001))
    write_pages(
        scaled, PageSlots(torch.tensor([0]), torch.tensor([4])), torch.full((1, 1, 16), 9.0), torch.zeros(1, 1, 16)
    )
    assert pages[0, 0, 0].float().unique().tolist() == [448.0]


def test_drafts_on_fp8_pages_never_change_the_text(pair) -> None:
    """Drafted and plain decoding agree token for token, whatever the pages cost in accuracy."""
    target, drafter = pair
    scales = (LayerKvScales(k=0.02, v=0.02),)
    quantization = QuantizationSpec(target_kv=scales * 4, draft_kv=scales * 2)
    prompt = list(range(5, 40))
    runs = [
        decode(make_executor(target, drafter, quantization=quantization), prompt, 40, num_draft_tokens=num_draft_tokens)
        for num_draft_tokens in (0, 3)
    ]
    assert runs[0].tokens[:40] == runs[1].tokens[:40]
    exact = decode(make_executor(target, drafter), prompt, 40, num_draft_tokens=0)
    assert runs[0].logprobs[:5] != exact.logprobs[:5]  # the pages are FP8 indeed
