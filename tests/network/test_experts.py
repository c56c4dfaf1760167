"""Experts and sinks as ops: experts in either form agree, and a row gets what it gets alone."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.attention import attend_rows
from dflash_trt.backends.torch.attention_plan import plan_attention
from dflash_trt.backends.torch.moe import Choice, SeparateExperts, chosen_experts, run_chosen_experts, separated
from dflash_trt.backends.torch.native.four_bits import FourBits
from dflash_trt.backends.torch.native.library import NoKernels, cpu_kernels
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.backends.torch.scores import Scores
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors
from dflash_trt.network.feed_forward import RoutedExperts, bind_feed_forward
from dflash_trt.network.ops import Experts, Linear, StackedExperts
from dflash_trt.network.rank_tensors import RankTensors
from tests.caches import cache_of
from tests.checkpoint.expert_files import to_mxfp4
from tests.engines import make_executor
from tests.factories import make_target
from tests.kernels import reference_attention
from tests.network.test_attention_batches import PAGE_SIZE, _inputs

SILU = Moe(
    num_experts=16, num_experts_per_token=3, intermediate_size=24, routing="softmax_top_k", normalizes_top_k=True
)
CLAMPED = SILU.model_copy(
    update={
        "routing": "top_k_softmax",
        "normalizes_top_k": False,
        "activation": "clamped_swiglu",
        "limit": 0.8,
        "alpha": 1.702,
        "has_bias": True,
    }
)
SPECS = pytest.mark.parametrize("moe", [SILU, CLAMPED], ids=["silu", "clamped_swiglu"])
HIDDEN = 64


def random_experts(moe: Moe, *, seed: int = 0) -> StackedExperts[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    num_experts, ffn = moe.num_experts, moe.intermediate_size
    return StackedExperts(
        router=Linear(weight=randn(num_experts, HIDDEN), bias=randn(num_experts) if moe.has_bias else None),
        num_experts=num_experts,
        gate_up=Linear(
            weight=randn(num_experts, 2 * ffn, HIDDEN), bias=randn(num_experts, 2 * ffn) if moe.has_bias else None
        ),
        down=Linear(weight=randn(num_experts, HIDDEN, ffn), bias=randn(num_experts, HIDDEN) if moe.has_bias else None),
    )


def rows_and_choice(moe: Moe, experts: Experts[torch.Tensor], num_rows: int) -> tuple[torch.Tensor, Choice]:
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(9))
    logits = torch.nn.functional.linear(x, experts.router.weight, experts.router.bias)
    return x, chosen_experts(logits, moe)


@SPECS
def test_separate_experts_give_what_stacked_ones_give(moe: Moe) -> None:
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, 37)
    expected = run_chosen_experts(x, experts, moe, choice)
    torch.testing.assert_close(run_chosen_experts(x, separated(experts), moe, choice), expected, rtol=0, atol=1e-6)
    part = replace(experts, first_expert=1, choice_bias=choice.weights, expert_scales=choice.weights)
    found, expected = separated(part), run_chosen_experts(x, part, moe, choice)
    torch.testing.assert_close(run_chosen_experts(x, found, moe, choice), expected, rtol=0, atol=1e-6)
    assert found.choice_bias is part.choice_bias and found.expert_scales is part.expert_scales
    other, expected = Choice(choice.expert_ids, choice.weights.flip(1)), run_chosen_experts(x, experts, moe, choice)
    assert (run_chosen_experts(x, separated(experts), moe, other) - expected).abs().max() > 0.01


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_expert_of_all_tokens_has_the_activation_of_the_others(activation: str) -> None:
    moe = SILU.model_copy(update={"activation": activation, "shared_size": 24})
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, 37)
    plain = {f"experts.{name}": getattr(experts, name).weight for name in ("gate_up", "down")}
    plain |= {"router": experts.router.weight, "shared.gate_up": plain["experts.gate_up"][0]}
    plain["shared.down"] = plain["experts.down"][0]
    tensors = RankTensors(plain={f"layer.{name}": weight for name, weight in plain.items()}, slice_rows=torch.narrow)
    ops = object.__new__(TorchOps)
    ops._shared_rows = None
    layer = bind_feed_forward(moe, tensors, "layer")
    assert isinstance(layer, RoutedExperts) and layer.shared is not None
    found = layer._part(ops, layer.shared, x)
    gate, up = (x @ plain["shared.gate_up"].T).chunk(2, dim=-1)
    sums = {
        name: run_chosen_experts(x, experts, moe, choice) + (activate(gate) * up) @ plain["shared.down"].T
        for name, activate in (("silu", F.silu), ("gelu_tanh", partial(F.gelu, approximate="tanh")))
    }
    torch.testing.assert_close(found, sums.pop(activation), rtol=0, atol=1e-6)
    [other] = sums.values()
    assert (found - other).abs().max() > 0.01


@SPECS
def test_weights_sum_to_one_where_they_should(moe: Moe) -> None:
    _, choice = rows_and_choice(moe, random_experts(moe), 37)
    torch.testing.assert_close(choice.weights.sum(1), torch.ones(37))
    plain = moe.model_copy(update={"normalizes_top_k": False, "routing": "softmax_top_k"})
    _, choice = rows_and_choice(plain, random_experts(moe), 37)
    assert (choice.weights.sum(1) < 0.9).all()


@SPECS
def test_equal_logits_go_to_the_lower_expert(moe: Moe) -> None:
    assert (chosen_experts(torch.zeros(5, moe.num_experts).bfloat16(), moe).expert_ids == torch.arange(3)).all()


@SPECS
def test_experts_that_nobody_chose_are_not_run(moe: Moe) -> None:
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, 2)
    expected = run_chosen_experts(x, experts, moe, choice)
    unused = [e for e in range(moe.num_experts) if e not in choice.expert_ids]
    assert len(unused) >= 10
    experts.gate_up.weight[unused] = torch.nan
    experts.down.weight[unused] = torch.nan
    assert torch.equal(run_chosen_experts(x, experts, moe, choice), expected)


@SPECS
def test_a_row_gets_the_same_alone_and_among_others(moe: Moe) -> None:
    """Up to the rounding of GEMMs of another height, which a dense MLP has as well."""
    experts = random_experts(moe)
    x, choice = rows_and_choice(moe, experts, 64)
    among_others = run_chosen_experts(x, experts, moe, choice)
    alone = torch.cat(
        [
            run_chosen_experts(x[i : i + 1], experts, moe, Choice(choice.expert_ids[i][None], choice.weights[i][None]))
            for i in range(len(x))
        ]
    )
    torch.testing.assert_close(alone, among_others, rtol=0, atol=2e-6)  # measured 6e-7


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.8}, {"score_scale": 0.6}, {"softcap": 0.8, "score_scale": 0.6}])
def test_sinks_take_their_share_of_the_softmax(window: int | None, options: dict[str, float]) -> None:
    context_lens, width, heads = [3, 30, 17], 3, 4
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(context_lens) * width, heads, 16, generator=generator)
    k, v = torch.randn(2, len(q), 2, 16, generator=generator)
    pages = torch.randn(len(context_lens) * 12, 2, PAGE_SIZE, 2, 16, generator=generator)
    sinks = torch.randn(heads, generator=generator)
    inputs = _inputs(context_lens, width)
    plan = plan_attention(inputs, page_size=PAGE_SIZE, num_draft_tokens=width - 1)

    def scores(sinks: torch.Tensor | None) -> Scores:
        return Scores(sinks=sinks, scale=options.get("score_scale"), softcap=options.get("softcap"))

    found = attend_rows(plan, q, k, v, cache_of(pages), AttentionMask(window=window), scores(sinks))
    requests = RequestTensors(
        token_offsets=inputs.token_offsets, context_lens=inputs.context_lens, page_table=inputs.page_table
    )

    def reference(sinks: torch.Tensor | None, **options: float) -> torch.Tensor:  # the pages are written by now
        given = AttentionOptions(window=window, sinks=sinks, **options)
        return reference_attention.attend_pages(q, pages, requests, given).flatten(1)

    torch.testing.assert_close(found, reference(sinks, **options), rtol=0, atol=1e-6)
    assert (found - reference(sinks.roll(1), **options)).abs().max() > 0.01
    for name in options:
        others = {key: value for key, value in options.items() if key != name}
        assert (found - reference(sinks, **others)).abs().max() > 0.01
    found = attend_rows(plan, q, k, v, cache_of(pages), AttentionMask(window=window), scores(None))
    torch.testing.assert_close(found, reference(None, **options), rtol=0, atol=1e-6)


@pytest.mark.skipif(isinstance(cpu_kernels(), NoKernels), reason="no CPU kernels")
def test_an_engine_multiplies_experts_of_four_bits_where_they_are_stored(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", family="gpt_oss", hidden_size=64, intermediate_size=64, tokenizer=False)
    to_mxfp4(target)
    logits = {}
    for dtype, has_kernels in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        executor = make_executor(target, dtype=dtype, has_kernels=has_kernels)
        for layer in executor.network.target_weights.layers:
            experts = layer.feed_forward.experts
            mlps = experts.mlps if isinstance(experts, SeparateExperts) else ()
            assert len(mlps) == (experts.num_experts if has_kernels else 0)
            assert all(
                isinstance(linear, FourBits) and linear.block_scale is not None for mlp in mlps for linear in mlp
            )
        logits[dtype, has_kernels] = executor.target_logits([3, 9, 4, 1, 7, 7, 2]).float()
    exact, plain = logits[torch.float32, False], logits[torch.bfloat16, False]
    assert (logits[torch.float32, True] - exact).abs().max() < 1e-4  # measured 1e-5
    rounding = (plain - exact).abs().max()
    assert (logits[torch.bfloat16, True] - plain).abs().max() < 0.2 * rounding  # measured 0.08
