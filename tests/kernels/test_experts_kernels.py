"""Experts on sorted rows against their definition in plain PyTorch, for every form of weights."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.backends.torch.moe import activated
from dflash_trt.backends.torch.quantized_linear import quantized_fp8, quantized_nvfp4
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.kernels import experts_launch, routing_launch
from dflash_trt.kernels.experts import expert_sum_kernel
from dflash_trt.kernels.experts_launch import PackedExperts, run_experts
from dflash_trt.kernels.routing_launch import Router, Routing, new_ticket, route
from tests.kernels import reference_experts
from tests.kernels.packed_weights import Weight, make_weight
from tests.kernels_on import DEVICE, moved

NUM_EXPERTS, HIDDEN, FFN, NUM_CHOSEN = 5, 160, 96, 2
TOLERANCE = 2e-6  # of the largest result: float32 sums in another order. Measured in the interpreter: 4e-7
BFLOAT16_TOLERANCE = 0.05  # it rounds what the kernels keep in float32. Measured in the interpreter: 0.026
CODE_TOLERANCE = 0.02  # an activation at the border of two codes may go either way. Measured: 0.003
CLAMPED = Moe(
    num_experts=NUM_EXPERTS,
    num_experts_per_token=NUM_CHOSEN,
    intermediate_size=FFN,
    routing="top_k_softmax",
    activation="clamped_swiglu",
    limit=0.7,
    alpha=1.702,
)
SILU, GELU = (CLAMPED.model_copy(update={"activation": name}) for name in ("silu", "gelu_tanh"))
WEIGHT_ONLY = ["plain", "fp8", "fp8_block", "mxfp4", "nvfp4", "int4"]


def make_experts(
    form: str, moe: Moe, *, input_scales: tuple[float, ...] = (), has_bias: bool = False
) -> tuple[PackedExperts, Weight, Weight]:
    options = {"has_bias": has_bias}
    shape = (NUM_EXPERTS, 2 * FFN, HIDDEN)
    gate_up = make_weight(form, shape, segments=(FFN, FFN), input_scales=input_scales, seed=1, **options)
    shape = (NUM_EXPERTS, HIDDEN, FFN)
    down = make_weight(form, shape, segments=(HIDDEN,), input_scales=input_scales[:1], seed=2, **options)
    experts = PackedExperts(
        gate_up=moved(gate_up.packed),
        down=moved(down.packed),
        activation=moe.activation,
        limit=moe.limit or 0.0,
        alpha=moe.alpha or 0.0,
    )
    experts.check()
    return experts, gate_up, down


def make_rows(num_rows: int, *, seed: int = 3) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def routed(num_rows: int, *, num_chosen: int = NUM_CHOSEN, **options) -> Routing:
    logits = torch.randn(num_rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    return route(logits, Router(kind="top_k_softmax", num_chosen=num_chosen, **options), new_ticket(DEVICE))


def defined(x: Tensor, gate_up: Weight, down: Weight, routing: Routing, moe: Moe, **quantizers) -> Tensor:
    """On the CPU."""
    biases = None if gate_up.packed.bias is None else (gate_up.packed.bias, down.packed.bias)
    return reference_experts.run_experts(
        x.cpu(),
        gate_up.values,
        down.values,
        routing.expert_ids.cpu().long(),
        routing.weights.cpu(),
        activation=lambda both: activated(both, moe),
        biases=biases,
        **quantizers,
    )


@pytest.mark.parametrize(
    ("form", "input_scales"), [("plain", ()), ("mxfp4", ()), ("fp8", (0.01, 0.01)), ("nvfp4", (0.01, 0.013))]
)
def test_weights_of_the_router_scale_rows_before_they_are_quantized(
    form: str, input_scales: tuple[float, ...], exact_codes: None
) -> None:
    """Llama 4's experts; the negative control weighs results."""
    experts, gate_up, down = make_experts(form, SILU, input_scales=input_scales, has_bias=True)
    logits = torch.randn(11, NUM_EXPERTS, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    routing = route(logits, Router(kind="sigmoid_top_k", num_chosen=NUM_CHOSEN), new_ticket(DEVICE))
    quantized = {"fp8": quantized_fp8, "nvfp4": quantized_nvfp4}.get(form)

    def rounded(x: Tensor, weight: Weight, expert: int, segment: int) -> Tensor:
        if quantized is None:
            return x
        scale = weight.input_scale[expert, segment].item()
        return quantized(x[None], scale)[0].float() * scale

    x = make_rows(11)
    expected = defined(
        x,
        gate_up,
        down,
        routing,
        SILU,
        scales_inputs=True,
        quantize_input=lambda x, expert, segment: rounded(x, gate_up, expert, segment),
        quantize_hidden=lambda x, expert: rounded(x, down, expert, 0),
    )
    tolerance = CODE_TOLERANCE if input_scales else TOLERANCE
    assert error(run_experts(x, replace(experts, scales_inputs=True), routing), expected) < tolerance
    assert error(run_experts(x, experts, routing), expected) > 5 * CODE_TOLERANCE


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu(), expected.cpu()
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("form", "moe"),
    [*itertools.product(WEIGHT_ONLY, [SILU, CLAMPED]), ("plain", GELU)],
    ids=lambda value: value if isinstance(value, str) else value.activation,
)
def test_experts_compute_their_definition(form: str, moe: Moe, exact_codes: None) -> None:
    experts, gate_up, down = make_experts(form, moe, has_bias=moe is CLAMPED)
    x, routing = make_rows(11), routed(11)
    found, expected = run_experts(x, experts, routing), defined(x, gate_up, down, routing, moe)
    assert error(found, expected) < TOLERANCE
    changed = replace(gate_up.packed, codes=gate_up.packed.codes.clone())
    changed.codes[:, 0].view(torch.uint8)[:, :16] ^= 0x11  # the negative control: a few codes of one row per expert
    assert error(run_experts(x, replace(experts, gate_up=moved(changed)), routing), expected) > 100 * TOLERANCE


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("input_scales", [(0.01, 0.01), (0.01, 0.013)], ids=["one scale", "a scale for each half"])
def test_activations_are_quantized_with_the_scales_of_their_expert(
    form: str, input_scales: tuple[float, ...], exact_codes: None
) -> None:
    experts, gate_up, down = make_experts(form, SILU, input_scales=input_scales)
    assert experts.gate_up.splits_input == (input_scales[0] != input_scales[1])
    x, routing = make_rows(6), routed(6)
    quantized = {"fp8": quantized_fp8, "nvfp4": quantized_nvfp4}[form]

    def quantize(x: Tensor, weight: Weight, expert: int, segment: int, factor: float = 1.0) -> Tensor:
        scale = weight.input_scale[expert, segment].item() * factor
        return quantized(x[None], scale)[0].float() * scale

    quantizers = {
        "quantize_input": lambda x, expert, segment: quantize(x, gate_up, expert, segment),
        "quantize_hidden": lambda x, expert: quantize(x, down, expert, 0),
    }
    found = run_experts(x, experts, routing)
    assert error(found, defined(x, gate_up, down, routing, SILU, **quantizers)) < CODE_TOLERANCE
    for name in quantizers:  # the negative controls: the scale of one half, or of the other product, is another
        wrong = dict(quantizers)
        if name == "quantize_input":
            wrong[name] = lambda x, expert, segment: quantize(x, gate_up, expert, segment, 1 + 2.3 * segment)
        else:
            wrong[name] = lambda x, expert: quantize(x, down, expert, 0, 3.3)
        assert error(found, defined(x, gate_up, down, routing, SILU, **wrong)) > 2 * CODE_TOLERANCE, name


def defined_in_int8(x: Tensor, weights: tuple[Weight, Weight], routing: Routing, moe: Moe) -> Tensor:
    """On the CPU."""
    gate_up, down = (
        reference_experts.int8_experts(weight.packed.codes, weight.packed.row_scale, weight.packed.bias)
        for weight in weights
    )
    ids, of_entries = routing.expert_ids.cpu().long(), routing.weights.cpu()
    return reference_experts.run_int8_experts(x.cpu(), gate_up, down, ids, of_entries, moe)


@pytest.mark.parametrize("moe", [SILU, CLAMPED, GELU], ids=lambda moe: moe.activation)
@pytest.mark.parametrize("num_rows", [1, 11, 60])  # tiles of 16 and of 32
def test_experts_in_int8_have_the_results_of_their_definition(num_rows: int, moe: Moe) -> None:
    """The negative control: one large number changes the codes of its row, and of no other."""
    experts, *weights = make_experts("int8", moe, has_bias=moe is not GELU)
    x, routing = make_rows(num_rows), routed(num_rows)
    x *= torch.logspace(-2, 0, num_rows, device=DEVICE)[:, None]
    expected = defined_in_int8(x, weights, routing, moe)
    size = expected.abs().amax(dim=1)
    off = (run_experts(x, experts, routing).cpu() - expected).abs().amax(dim=1) / size
    assert off.max() < TOLERANCE
    x[0, 5] *= 100
    off = (run_experts(x, experts, routing).cpu() - expected).abs().amax(dim=1) / size
    assert off[0] > CODE_TOLERANCE and (num_rows == 1 or off[1:].max() < TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_the_router_scale_rows_before_they_become_integers(dtype: torch.dtype) -> None:
    """Llama 4's experts, a row with codes of its own for each; the negative control weighs results."""
    moe = SILU.model_copy(update={"scales_inputs": True})
    experts, *weights = make_experts("int8", moe)
    logits = torch.randn(11, NUM_EXPERTS, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    routing = route(logits, Router(kind="sigmoid_top_k", num_chosen=NUM_CHOSEN), new_ticket(DEVICE))
    x = make_rows(11).to(dtype)
    expected = defined_in_int8(x, weights, routing, moe).float()
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    assert error(run_experts(x, replace(experts, scales_inputs=True), routing).float(), expected) < tolerance
    assert error(run_experts(x, experts, routing).float(), expected) > 5 * CODE_TOLERANCE


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_choice_gives_the_defined_sums(data) -> None:
    """Experts without rows, all rows of one expert, several tiles of an expert."""
    num_rows = data.draw(st.sampled_from([1, 3, 20, 40]))
    ids = data.draw(st.permutations(range(NUM_EXPERTS)).map(lambda ids: ids[:NUM_CHOSEN]))
    is_one = data.draw(st.booleans())
    seed = data.draw(st.integers(0, 99))
    logits = torch.randn(num_rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    if is_one:
        logits[:, ids] += 20
    routing = route(logits.to(DEVICE), Router(kind="top_k_softmax", num_chosen=NUM_CHOSEN), new_ticket(DEVICE))
    experts, gate_up, down = make_experts("plain", SILU)
    x = make_rows(num_rows, seed=seed)
    assert error(run_experts(x, experts, routing), defined(x, gate_up, down, routing, SILU)) < TOLERANCE


def test_the_experts_of_two_ranks_add_up_to_all() -> None:
    experts, _, _ = make_experts("plain", SILU)
    x = make_rows(9)
    parts = []
    for first, end in ((0, 2), (2, NUM_EXPERTS)):
        mine = replace(
            experts,
            gate_up=replace(experts.gate_up, codes=experts.gate_up.codes[first:end]),
            down=replace(experts.down, codes=experts.down.codes[first:end]),
        )
        parts.append(run_experts(x, mine, routed(9, first_expert=first, num_here=end - first)))
    whole = run_experts(x, experts, routed(9))
    assert error(parts[0] + parts[1], whole) < TOLERANCE
    assert error(parts[0], whole) > 0.1 and error(parts[1], whole) > 0.1


def test_a_row_does_not_depend_on_its_mates_within_a_size_of_tiles() -> None:
    experts, _, _ = make_experts("mxfp4", SILU)
    x, logits = make_rows(20), torch.randn(20, NUM_EXPERTS, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    router, ticket = Router(kind="softmax_top_k", num_chosen=NUM_CHOSEN), new_ticket(DEVICE)
    whole = run_experts(x, experts, route(logits, router, ticket))
    alone = run_experts(x[7:9].clone(), experts, route(logits[7:9].clone(), router, ticket))
    assert torch.equal(whole[7:9], alone)


def test_a_layer_takes_four_launches_beside_the_routers_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_class = type(expert_sum_kernel)
    launches, run = [], kernel_class.run

    def recorded(kernel, *args, **kwargs):
        launches.append(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(kernel_class, "run", recorded)
    experts, _, _ = make_experts("plain", SILU)
    for num_rows in (1, 70):
        launches.clear()
        run_experts(make_rows(num_rows), experts, routed(num_rows))
        assert launches == ["routing_kernel", "expert_gate_up_kernel", "expert_down_kernel", "expert_sum_kernel"]


def test_packed_tensors_that_kernels_would_misread_are_refused() -> None:
    experts, _, _ = make_experts("mxfp4", SILU)
    with pytest.raises(ValueError, match="block_scale: expected"):
        replace(experts.gate_up, block_scale=experts.gate_up.block_scale.float()).check()
    with pytest.raises(ValueError, match="codes: expected"):
        replace(experts.gate_up, codes=experts.gate_up.codes.int()).check()
    assert experts_launch.BLOCK_IN % 128 == 0 and min(routing_launch.TOKEN_TILES) == 16
