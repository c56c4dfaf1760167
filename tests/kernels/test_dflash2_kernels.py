"""The kernels of DFlash2 against PyTorch's ops: the convolution of a block, and the walk through its candidates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch import dflash2 as torch_dflash2
from dflash_trt.kernels import selector
from dflash_trt.kernels.selector_launch import TILE, block_conv, select_tokens
from dflash_trt.network.ops import Codebooks
from dflash_trt.network.proposal import Proposal

TEMPERATURES = (0.0, 0.8, 1.4)


def randn(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(
    ("num_slots", "num_taps", "hidden_size", "group_size"),
    [(4, 2, 96, 16), (8, 4, 24, 1), (3, 4, 1040, 520), (1, 2, 32, 32), (2, 1, 16, 4)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_block_is_convolved_as_in_pytorch(
    device: torch.device, num_slots: int, num_taps: int, hidden_size: int, group_size: int, dtype: torch.dtype
) -> None:
    x = randn(device, 3 * num_slots, hidden_size, dtype=dtype)
    both = randn(device, 3 * num_slots, 2 * num_taps * (hidden_size // group_size), seed=1, dtype=dtype)
    filters = both.chunk(2, dim=1)[1]  # of the other side of a sublayer: its rows are further apart
    base = randn(device, 1, num_taps, hidden_size, seed=2, dtype=dtype)
    found = block_conv(x, filters, base, num_slots=num_slots)
    exact = torch_dflash2.block_conv(x.double(), filters.double(), base.double(), num_slots=num_slots)
    error = {torch.float32: 1e-5, torch.float16: 8e-3}[dtype]  # of values up to 12; measured: 2e-6, 4e-3
    assert (found - exact).abs().max() < error
    if num_slots > 1 and num_taps > 1:  # the negative control: another request's last slot before slot 0
        unbroken = torch_dflash2.block_conv(x.double(), filters.double(), base.double(), num_slots=3 * num_slots)
        assert (found - unbroken).abs().max() > 0.1


class Step:
    """Blocks of three requests, greedy and not."""

    def __init__(
        self, device: torch.device, *, vocab_size: int, num_slots: int, top_k: int, rank: int = 6, dtype: Any
    ) -> None:
        self.device, self.top_k, num_rows = device, top_k, len(TEMPERATURES) * num_slots
        self.logits = randn(device, num_rows, vocab_size, dtype=dtype)
        self.hidden = randn(device, num_rows, rank, seed=1, dtype=dtype)
        self.predecessor = randn(device, vocab_size, rank, seed=2, dtype=dtype)
        self.successor = randn(device, vocab_size, rank, seed=3, dtype=dtype)
        self.bonus = torch.tensor([0, vocab_size - 1, vocab_size // 2], dtype=torch.int32, device=device)
        self.temperature = torch.tensor(TEMPERATURES, device=device)
        self.seed = torch.tensor([1, 2**40 + 5, 9], device=device)
        self.starts = torch.tensor([7, 0, 300], dtype=torch.int32, device=device)
        self.stream = torch.zeros(3, dtype=torch.int32, device=device)

    def selected(self) -> tuple[Tensor, Tensor, Tensor]:
        codebooks, requests = (
            (self.predecessor, self.successor),
            (self.bonus, self.temperature, self.seed, self.stream, self.starts),
        )
        return select_tokens(self.logits, self.hidden, codebooks, requests, top_k=self.top_k)

    def found(self) -> list[list[int]]:
        tokens, draft_topk_ids, draft_topk_probs = self.selected()
        assert tokens.dtype == draft_topk_ids.dtype == torch.int32
        assert not draft_topk_probs[self.stream == 0].any()
        return tokens.tolist()

    def defined(self) -> Proposal[Tensor]:
        """On the CPU."""
        tensors = {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}
        at = SimpleNamespace(**tensors)
        codebooks = Codebooks(predecessor=at.predecessor, successor=at.successor, top_k=self.top_k)
        inputs: Any = SimpleNamespace(temperature=at.temperature, seed=at.seed, draft_stream=at.stream)
        acceptance: Any = SimpleNamespace(bonus_tokens=at.bonus, next_context_lens=at.starts)
        return torch_dflash2.select_tokens(at.logits, at.hidden, codebooks, inputs, acceptance)[0]

    def expected(self) -> list[list[int]]:
        return self.defined().tokens.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("vocab_size", "num_slots", "top_k"),
    [(63, 3, 4), (TILE, 1, 16), (2 * TILE + 777, 2, 16), (TILE + 3, 2, 5), (5, 4, 5), (300, 2, 1), (300, 1, 64)],
)
def test_the_walk_takes_the_tokens_of_pytorch(
    device: torch.device, vocab_size: int, num_slots: int, top_k: int, dtype: torch.dtype
) -> None:
    step = Step(device, vocab_size=vocab_size, num_slots=num_slots, top_k=top_k, dtype=dtype)
    assert step.found() == step.expected()


def test_every_input_of_the_walk_counts(device: torch.device) -> None:
    """The negative controls: the token before, hidden state, codebooks, and for sampled requests seed and position."""
    first = Step(device, vocab_size=300, num_slots=6, top_k=16, dtype=torch.float32).found()
    for name in ("bonus", "hidden", "predecessor", "successor", "seed", "starts"):
        step = Step(device, vocab_size=300, num_slots=6, top_k=16, dtype=torch.float32)
        change = {"bonus": lambda x: (x + 1) % 300, "seed": lambda x: x + 1, "starts": lambda x: x + 1}
        setattr(step, name, change.get(name, torch.neg)(getattr(step, name)))
        found = step.found()
        assert found == step.expected()
        assert found[1:] != first[1:], name
        assert found[0] == first[0] or name not in ("seed", "starts"), "greedy knows neither"


@pytest.mark.parametrize(("vocab_size", "num_slots", "top_k"), [(63, 3, 4), (TILE + 3, 2, 5), (300, 4, 16)])
def test_sampled_drafts_and_their_probabilities_are_those_of_pytorch(
    device: torch.device, vocab_size: int, num_slots: int, top_k: int
) -> None:
    step = Step(device, vocab_size=vocab_size, num_slots=num_slots, top_k=top_k, dtype=torch.float32)
    shared = step.found()
    step.stream[2] = 1
    tokens, draft_topk_ids, draft_topk_probs = step.selected()
    expected = step.defined()
    assert expected.draft_topk_ids is not None and expected.draft_topk_probs is not None
    assert tokens.tolist() == expected.tokens.tolist()
    assert draft_topk_ids.tolist() == expected.draft_topk_ids.tolist()
    torch.testing.assert_close(draft_topk_probs[2].cpu(), expected.draft_topk_probs[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(draft_topk_probs[2].view(num_slots, top_k).sum(dim=1).cpu(), torch.ones(num_slots))
    assert not draft_topk_probs[:2].any()
    assert tokens[2].tolist() != shared[2] or vocab_size == 63  # the negative control: noise of another stream
    assert tokens[:2].tolist() == shared[:2]
    step.temperature[2] *= 1.5
    assert not torch.allclose(step.selected()[2][2], draft_topk_probs[2], atol=1e-3)


def test_a_walk_over_logits_that_are_not_finite_has_no_probabilities(device: torch.device) -> None:
    step = Step(device, vocab_size=300, num_slots=2, top_k=4, dtype=torch.float32)
    step.stream[1:] = 1
    step.logits[2] = torch.nan
    step.logits[4, 7] = torch.inf
    draft_topk_probs = step.selected()[2].view(3, 2, 4)
    expected = step.defined().draft_topk_probs
    assert expected is not None
    assert not draft_topk_probs[1, 0].any() and not draft_topk_probs[2, 0].any()
    assert not expected.view(3, 2, 4)[1, 0].any() and not expected.view(3, 2, 4)[2, 0].any()
    torch.testing.assert_close(draft_topk_probs[:, 1].sum(dim=1).cpu(), torch.tensor([0.0, 1.0, 1.0]))


def test_equal_logits_are_taken_in_the_order_of_tokens(device: torch.device) -> None:
    step = Step(device, vocab_size=2 * TILE, num_slots=1, top_k=3, dtype=torch.float16)
    step.temperature.zero_()
    step.logits.fill_(-1.0)
    step.logits[0, [TILE + 1, 9, TILE + 5, 2 * TILE - 1]] = 2.0  # the fourth is no candidate
    step.logits[1, [3, TILE]] = torch.tensor([-0.0, 0.0], device=device, dtype=torch.float16)
    step.logits[2] = -torch.inf
    for best in (9, TILE + 1, TILE + 5, 2 * TILE - 1):
        step.successor.zero_()
        step.successor[best] = 50.0 * (step.predecessor[0] * step.hidden[0]).sign()
        found = step.found()
        assert found == step.expected()
        assert found[0] == [best if best < 2 * TILE - 1 else 9]
    assert found[1:] == [[3], [0]]


def test_rows_that_are_not_finite_give_tokens_of_the_vocabulary(device: torch.device) -> None:
    step = Step(device, vocab_size=TILE + 3, num_slots=2, top_k=4, dtype=torch.float32)
    expected = step.found()
    step.logits[0] = torch.nan
    step.hidden[2] = torch.nan
    found = step.found()
    assert all(0 <= token < TILE + 3 for row in found for token in row)
    assert found[2] == expected[2]
    step.logits[4, 100:] = torch.nan  # is below every number
    assert step.found()[2] == step.expected()[2] != expected[2]


def test_greedy_requests_do_not_make_noise(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("noise for a greedy request")

    step = Step(device, vocab_size=63, num_slots=2, top_k=4, dtype=torch.float32)
    monkeypatch.setattr(selector, "noise_of_tokens", refuse)
    with pytest.raises(Exception, match="noise for a greedy request"):
        step.found()
    step.temperature.zero_()
    assert step.found() == step.expected()


def test_what_the_kernels_are_not_made_for_is_refused(device: torch.device) -> None:
    step = Step(device, vocab_size=300, num_slots=1, top_k=65, dtype=torch.float32)
    with pytest.raises(ValueError, match="top_k: expected 1 to 64, found 65"):
        step.found()
    x, base = randn(device, 4, 16), randn(device, 1, 2, 16)
    with pytest.raises(ValueError, match="filters: expected whole blocks of 3 slots"):
        block_conv(x, randn(device, 4, 8), base, num_slots=3)
