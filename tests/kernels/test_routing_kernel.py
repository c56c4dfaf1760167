"""The choice of experts and its order, against plain PyTorch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.backends.torch.moe import chosen_experts
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.kernels.launch_rules import max_tiles, tile_tokens
from dflash_trt.kernels.routing_launch import Router, Routing, new_ticket, route
from tests.kernels import reference_experts
from tests.kernels_on import DEVICE

KINDS = ["softmax_top_k", "top_k_softmax", "sigmoid_top_k"]


def make_logits(num_rows: int, num_experts: int, *, num_levels: int = 0, seed: int = 0) -> torch.Tensor:
    """With `num_levels`, many are equal. No two levels add up to 0: their sigmoids would to 1, but for the rounding."""
    logits = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(seed)) * 2
    return logits if num_levels == 0 else (logits * num_levels / 8).round() / num_levels + 0.1


def run(logits: torch.Tensor, router: Router) -> Routing:
    ticket = new_ticket(DEVICE)
    routing = route(logits.to(DEVICE), router, ticket)
    assert ticket.item() == 0, "the next launch would find another number"
    return routing


def assert_sorted(routing: Routing, num_experts: int) -> None:
    """`order` and `tiles` are those of the choice."""
    ids = routing.expert_ids.cpu().long()
    assert torch.equal(routing.order.cpu().long(), reference_experts.sorted_entries(ids))
    expected = reference_experts.tiles(ids, num_experts=num_experts, tokens=routing.tokens)
    found = [tuple(tile) for tile in routing.tiles.T.tolist()]
    assert len(found) >= len(expected)
    assert found[: len(expected)] == expected
    assert all(expert == -1 for expert, _, _ in found[len(expected) :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 1), (6, 2), (128, 4)])
def test_choice_and_order_are_those_of_plain_pytorch(kind, normalizes, num_experts, num_chosen):
    bias = torch.linspace(-0.5, 0.5, num_experts, device=DEVICE) if kind == "sigmoid_top_k" else None
    factor = 2.5 if kind == "sigmoid_top_k" else 1.0
    router = Router(kind=kind, num_chosen=num_chosen, normalizes=normalizes, factor=factor, choice_bias=bias)
    for num_levels in (0, 4):
        logits = make_logits(37, num_experts, num_levels=num_levels)
        routing = run(logits, router)
        ids, weights = reference_experts.route(logits.to(DEVICE), router)
        assert torch.equal(routing.expert_ids.long(), ids)
        torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=1e-7)
        assert_sorted(routing, num_experts)


@pytest.mark.parametrize(("routing_kind", "normalizes"), [("softmax_top_k", True), ("top_k_softmax", False)])
def test_the_choice_is_that_of_the_reference_backend(routing_kind, normalizes):
    """And a logit that changes the choice changes it here."""
    moe = Moe(
        num_experts=32, num_experts_per_token=4, intermediate_size=8, routing=routing_kind, normalizes_top_k=normalizes
    )
    router = Router(kind=routing_kind, num_chosen=4, normalizes=normalizes)
    logits = make_logits(20, 32)
    expected, routing = chosen_experts(logits, moe), run(logits, router)
    assert torch.equal(routing.expert_ids.cpu().long(), expected.expert_ids)
    torch.testing.assert_close(routing.weights.cpu(), expected.weights, rtol=1e-6, atol=1e-7)
    logits[3, 5] += 10
    other = run(logits, router)
    assert other.expert_ids[3, 0] == 5 and routing.expert_ids[3, 0] != 5


@pytest.mark.parametrize(
    ("num_experts", "num_groups", "num_chosen_groups", "num_chosen"),
    [(8, 4, 2, 3), (20, 4, 1, 5), (12, 3, 1, 3), (256, 8, 4, 8), (4, 2, 2, 1)],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_only_experts_of_the_best_groups_are_chosen(num_experts, num_groups, num_chosen_groups, num_chosen, has_bias):
    bias = make_logits(1, num_experts, seed=1)[0] / 4 if has_bias else None
    groups = {"num_groups": num_groups, "num_chosen_groups": num_chosen_groups}
    fields = {"num_experts": num_experts, "num_experts_per_token": num_chosen, "intermediate_size": 8}
    moe = Moe(**fields, routing="sigmoid_top_k", normalizes_top_k=True, has_choice_bias=has_bias, **groups)
    of_device = None if bias is None else bias.to(DEVICE)
    router = Router(kind="sigmoid_top_k", num_chosen=num_chosen, normalizes=True, choice_bias=of_device, **groups)
    for num_levels in (0, 4):
        logits = make_logits(37, num_experts, num_levels=num_levels)
        routing, expected = run(logits, router), chosen_experts(logits, moe, bias)
        assert torch.equal(routing.expert_ids.cpu().long(), expected.expert_ids)
        torch.testing.assert_close(routing.weights.cpu(), expected.weights, rtol=1e-6, atol=1e-7)
        assert torch.equal(reference_experts.route(logits.to(DEVICE), router)[0].cpu(), expected.expert_ids)
        assert_sorted(routing, num_experts)
        of_all = run(logits, replace(router, num_groups=1, num_chosen_groups=1))  # the negative control
        assert torch.equal(of_all.expert_ids, routing.expert_ids) == (num_chosen_groups == num_groups)


def test_rows_without_numbers_have_experts_of_open_groups():
    router = Router(kind="sigmoid_top_k", num_chosen=4, normalizes=True, num_groups=4, num_chosen_groups=2)
    logits = make_logits(3, 12)
    logits[1] = torch.nan
    logits[2, 3:] = torch.nan
    for ids in run(logits, router).expert_ids.tolist():
        assert len(set(ids)) == 4 and len({expert // 3 for expert in ids}) == 2


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_choice_is_sorted_with_empty_experts_and_full_ones(data):
    num_experts = data.draw(st.integers(1, 12))
    num_chosen = data.draw(st.integers(1, min(num_experts, 3)))
    choices = st.permutations(range(num_experts)).map(lambda ids: ids[:num_chosen])
    rows = data.draw(st.lists(choices, min_size=1, max_size=50) | choices.map(lambda ids: [ids] * 41))
    logits = torch.zeros(len(rows), num_experts)
    for row, ids in enumerate(rows):
        logits[row, ids] = torch.arange(num_chosen, 0, -1).float()
    routing = run(logits, Router(kind="top_k_softmax", num_chosen=num_chosen))
    assert routing.expert_ids.tolist() == [list(ids) for ids in rows]
    assert_sorted(routing, num_experts)


def test_rows_without_numbers_still_have_experts_of_their_own():
    logits = make_logits(3, 8)
    logits[1] = torch.nan
    logits[2, 4:] = torch.nan
    for kind in KINDS:
        routing = run(logits, Router(kind=kind, num_chosen=6))
        assert all(len(set(ids)) == 6 and set(ids) <= set(range(8)) for ids in routing.expert_ids.tolist())
        assert routing.weights[0].isfinite().all() and not routing.weights[1:, :].isfinite().all(dim=1).any()
        assert_sorted(routing, 8)


def test_all_rows_of_one_expert_and_each_row_of_its_own_fit_the_grid():
    for num_rows, num_experts, tokens in ((1, 128, 16), (40, 4, 16), (1000, 3, 64), (5, 5, 32)):
        most = max_tiles(num_entries=num_rows, num_experts=num_experts, tokens=tokens)
        assert most >= -(-num_rows // tokens)
        spread = min(num_rows, num_experts)
        assert most >= spread - 1 + -(-(num_rows - spread + 1) // tokens)


def test_tiles_hold_what_an_expert_gets_on_average():
    def tiles(widens_weights: int) -> list[int]:
        rows = (8, 512, 513, 1024, 1025, 9000)
        return [tile_tokens(num_entries=4 * n, num_experts=128, widens_weights=widens_weights) for n in rows]

    assert tiles(widens_weights=0) == [16, 16, 32, 32, 64, 64]
    assert tiles(widens_weights=1) == [16] * 6


def test_a_corrupted_order_is_noticed():
    """The negative control."""
    routing = run(make_logits(20, 8), Router(kind="top_k_softmax", num_chosen=2))
    routing.order[:2] = routing.order[:2].flip(0)
    with pytest.raises(AssertionError):
        assert_sorted(routing, 8)
