"""Experts in plain layers: interpreted, they compute what torch computes, in every format; compiled by TensorRT-RTX."""

from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.lowering_experts import run_experts
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.backends.torch.moe import run_chosen_experts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.formats.base import QuantizedWeight, segment_amax
from dflash_trt.formats.registry import weight_format, weight_formats
from dflash_trt.network.ops import StackedExperts
from dflash_trt.network.rank_tensors import map_linears
from tests.network.test_experts import CLAMPED, SILU, random_experts, rows_and_choice
from tests.trt.interpreter import NetworkInterpreter
from tests.trt.networks import host_quantized, host_tensors, tensor_of

HIDDEN, NUM_ROWS = 64, 11
NUM_EXPERTS = 16
WIDE = SILU.model_copy(update={"intermediate_size": 128})  # whole blocks of every format, but for FP8's columns of 64
NOT_NORMALIZED = SILU.model_copy(update={"normalizes_top_k": False})


def quantized_experts(moe: Moe, name: str) -> StackedExperts[torch.Tensor]:
    known = weight_format(name)
    experts = random_experts(moe)
    amax = torch.linspace(2.0, 4.0, moe.num_experts)[:, None]

    def quantize(linear, segments):
        weight = linear.weight.to(torch.bfloat16)
        input_amax = amax * torch.linspace(1.0, 0.5, len(segments)) if known.has_input_scale else None
        ranges = segment_amax(weight, segments)
        if known.shares_weight_scale:
            ranges = ranges.amax(-1, keepdim=True).expand(-1, len(segments)).contiguous()
        return replace(
            linear, weight=known.quantize(weight, segments=segments, weight_amax=ranges, input_amax=input_amax)
        )

    ffn = moe.intermediate_size
    return replace(experts, gate_up=quantize(experts.gate_up, (ffn, ffn)), down=quantize(experts.down, (HIDDEN,)))


def of_host(experts: StackedExperts[torch.Tensor]) -> StackedExperts:
    def hosted(linear, name):
        weight, bias = linear.weight, linear.bias
        if isinstance(weight, QuantizedWeight):
            weight = host_quantized({name: weight})[name]
        else:
            weight = host_tensors({name: weight})[name]
        return replace(
            linear, weight=weight, bias=bias if bias is None else host_tensors({f"{name}_bias": bias})[f"{name}_bias"]
        )

    linears = {name: hosted(getattr(experts, name), name) for name in ("router", "gate_up", "down")}
    return replace(experts, **linears)


def define(trt, moe, experts, *, dtype="float32"):
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    layers = Layers(trt, network, logger)
    x = layers.add_input("x", dtype, (-1, HIDDEN), ("N", "H"))
    hosted = of_host(experts)
    logits = TrtOps(layers, None, None, []).linear(x, hosted.router)
    layers.mark_output(run_experts(layers, x, logits, hosted, moe), "out")
    return builder, network, layers


def interpreted(trt, moe, experts, x):
    _, network, layers = define(trt, moe, experts)
    constants = {owner.name: tensor_of(owner) for owner in layers.constant_owners}
    return NetworkInterpreter(trt, network, constants).run({"x": x})["out"]


def largest_difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("moe", [SILU, NOT_NORMALIZED, CLAMPED], ids=["silu", "not normalized", "clamped_swiglu"])
def test_every_kind_of_expert_computes_what_torch_computes(trt, moe):
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, NUM_ROWS)
    found = interpreted(trt, moe, experts, x)
    assert largest_difference(found, run_chosen_experts(x, experts, moe, choice)) < 1e-5


@pytest.mark.parametrize("name", [None, *weight_formats()])
def test_experts_of_every_format_compute_what_torch_computes(trt, name):
    experts = random_experts(WIDE) if name is None else quantized_experts(WIDE, name)
    x, choice = rows_and_choice(WIDE, experts, NUM_ROWS)
    expected = run_chosen_experts(x, experts, WIDE, choice)
    assert largest_difference(interpreted(trt, WIDE, experts, x), expected) < 1e-4


def in_bfloat16(linear):
    return linear if isinstance(linear.weight, QuantizedWeight) else replace(linear, weight=linear.weight.bfloat16())


@pytest.mark.parametrize("name", [None, *weight_formats()])
def test_experts_of_every_format_compile(trt, name):
    experts = map_linears(random_experts(WIDE) if name is None else quantized_experts(WIDE, name), in_bfloat16)
    builder, network, layers = define(trt, WIDE, experts, dtype="bfloat16")
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    profile.set_shape("x", (1, HIDDEN), (8, HIDDEN), (64, HIDDEN))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, layers._logger.errors


def test_what_experts_make_of_rows_they_did_not_get_cannot_reach_the_sum(trt):
    """Only row 0 chooses expert 0, whose results overflow."""
    experts = random_experts(SILU)
    x, _ = rows_and_choice(SILU, experts, NUM_ROWS)
    experts.router.weight.zero_()
    experts.router.weight[:, 0] = torch.linspace(1.0, 0.0, SILU.num_experts)
    x[:, 0] = -1.0  # the last experts are chosen
    x[0, 0] = 1.0
    experts.down.weight[0] = torch.inf
    found = interpreted(trt, SILU, experts, x)
    assert not found[0].isfinite().all()
    assert found[1:].isfinite().all()


@pytest.mark.parametrize("moe", [SILU, CLAMPED], ids=["silu", "clamped_swiglu"])
def test_ranks_with_a_part_of_the_experts_add_up_to_all(trt, moe):
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, NUM_ROWS)
    half = moe.num_experts // 2

    def part(first):
        def rows(linear):
            bias = None if linear.bias is None else linear.bias[first : first + half].contiguous()
            return replace(linear, weight=linear.weight[first : first + half].contiguous(), bias=bias)

        return replace(
            experts, num_experts=half, first_expert=first, gate_up=rows(experts.gate_up), down=rows(experts.down)
        )

    expected = run_chosen_experts(x, experts, moe, choice)
    parts = [interpreted(trt, moe, part(first), x) for first in (0, half)]
    assert largest_difference(parts[0] + parts[1], expected) < 1e-5
    assert largest_difference(parts[0], expected) > 0.01


@pytest.mark.parametrize("name", ["mxfp4", "int4", "nvfp4", "fp8"])
def test_codes_in_another_order_are_noticed(trt, name):
    experts = quantized_experts(WIDE, name)
    x, choice = rows_and_choice(WIDE, experts, NUM_ROWS)
    expected = run_chosen_experts(x, experts, WIDE, choice)
    codes = experts.down.weight.codes
    turned = codes.view(torch.uint8).flip(-1).contiguous().view(codes.dtype)
    changed = replace(experts, down=replace(experts.down, weight=replace(experts.down.weight, codes=turned)))
    assert largest_difference(interpreted(trt, WIDE, changed, x), expected) > 0.01


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_activations_are_rounded_with_the_scale_of_each_expert(trt, name):
    """With the scale of the first expert for all, results differ."""
    experts = quantized_experts(WIDE, name)
    x, choice = rows_and_choice(WIDE, experts, NUM_ROWS)
    expected = run_chosen_experts(x, experts, WIDE, choice)
    weight = experts.gate_up.weight
    scale = (weight.input_scale[:1] * 0.05).expand_as(weight.input_scale).contiguous()
    changed = replace(experts, gate_up=replace(experts.gate_up, weight=replace(weight, input_scale=scale)))
    assert largest_difference(interpreted(trt, WIDE, changed, x), expected) > 0.01
