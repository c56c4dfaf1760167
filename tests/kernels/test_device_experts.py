"""Experts of every stored format prepared for a GPU, against the experts of the reference backend."""

from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.cuda.experts import prepare_device_experts, run_device_experts
from dflash_trt.backends.cuda.packed import FORMS
from dflash_trt.backends.torch.moe import chosen_experts, run_chosen_experts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight, segment_amax
from dflash_trt.formats.registry import weight_formats
from dflash_trt.network.ops import Linear, StackedExperts
from tests.kernels_on import moved

HIDDEN, FFN = 128, 64
MOE = Moe(num_experts=6, num_experts_per_token=2, intermediate_size=FFN, routing="softmax_top_k", normalizes_top_k=True)
TOLERANCE = 1e-5  # of the largest result; measured in the interpreter: 2e-7
CODE_TOLERANCE = 0.03  # activations at the border of two codes; measured: 2e-7


def quantized_linear(format_name: str, shape: tuple[int, ...], segments: tuple[int, ...], seed: int) -> Linear:
    known = weight_formats()[format_name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
    amax = segment_amax(weight, segments)
    if known.shares_weight_scale:
        amax = amax.amax(dim=-1, keepdim=True).expand_as(amax).clone()
    input_amax = torch.full((shape[0], len(segments)), 4.0) if known.has_input_scale else None
    quantized = known.quantize(weight, segments=segments, weight_amax=amax, input_amax=input_amax)
    return Linear(weight=quantized, bias=torch.randn(shape[:2], generator=torch.Generator().manual_seed(seed + 9)))


def make_experts(format_name: str) -> StackedExperts[torch.Tensor]:
    return StackedExperts(
        router=Linear(weight=torch.zeros(1)),
        num_experts=MOE.num_experts,
        gate_up=quantized_linear(format_name, (MOE.num_experts, 2 * FFN, HIDDEN), (FFN, FFN), 1),
        down=quantized_linear(format_name, (MOE.num_experts, HIDDEN, FFN), (HIDDEN,), 2),
    )


@pytest.mark.parametrize("format_name", ["fp8", "mxfp4"])  # with row scales of its own, and without
@pytest.mark.parametrize("first_expert", [0, 2])
def test_factors_of_experts_are_in_their_weights(format_name: str, first_expert: int, exact_codes: None) -> None:
    moe = MOE.model_copy(update={"routing": "scaled_softmax_top_k"})
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(first_expert + MOE.num_experts, generator=generator) + 0.5
    moe = moe.model_copy(update={"num_experts": len(scales)})
    experts = replace(make_experts(format_name), expert_scales=scales, first_expert=first_expert)
    x, logits = torch.randn(7, HIDDEN, generator=generator), torch.randn(7, len(scales), generator=generator)
    expected = run_chosen_experts(x, experts, moe, chosen_experts(logits, moe, scales=scales))
    x, logits, experts = moved(x), moved(logits), moved(experts)
    found = run_device_experts(x, logits, prepare_device_experts(experts), moe).cpu()
    unscaled = run_device_experts(x, logits, prepare_device_experts(replace(experts, expert_scales=None)), moe).cpu()
    tolerance = CODE_TOLERANCE if weight_formats()[format_name].has_input_scale else TOLERANCE
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance
    assert float((unscaled - expected).abs().max() / expected.abs().max()) > 2 * CODE_TOLERANCE, "the negative control"


@pytest.mark.parametrize(
    "format_name", sorted(n for n, known in weight_formats().items() if known.weight_type in FORMS)
)
def test_prepared_experts_compute_what_the_reference_backend_computes(format_name: str, exact_codes: None) -> None:
    experts, generator = make_experts(format_name), torch.Generator().manual_seed(3)
    x, logits = torch.randn(7, HIDDEN, generator=generator), torch.randn(7, MOE.num_experts, generator=generator)
    expected = run_chosen_experts(x, experts, MOE, chosen_experts(logits, MOE))
    experts = moved(experts)
    prepared = prepare_device_experts(experts)
    assert isinstance(experts.down.weight, QuantizedWeight)
    assert prepared.down.codes.data_ptr() == experts.down.weight.codes.data_ptr(), "the codes were copied or unpacked"
    has_input_scale = weight_formats()[format_name].has_input_scale
    tolerance = CODE_TOLERANCE if has_input_scale else TOLERANCE

    def error() -> float:
        found = run_device_experts(moved(x), moved(logits), prepared, MOE).cpu()
        return float((found - expected).abs().max() / expected.abs().max())

    assert error() < tolerance
    prepared.down.codes[:, :20].view(torch.uint8).bitwise_xor_(0x22)  # the negative control
    assert not error() <= 3 * CODE_TOLERANCE  # or NaN
