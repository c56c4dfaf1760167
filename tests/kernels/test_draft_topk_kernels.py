"""Drafts for rejection sampling and their top-k candidates, against their definition in PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.backends.torch.rejection import sample_topk
from dflash_trt.kernels import argmax
from dflash_trt.kernels.sampling_launch import draft_tokens
from dflash_trt.kernels.sampling_scratch import PIECES, TILE
from tests.kernels.test_sampling_kernels import ignores_infinities
from tests.kernels_on import KERNELS_ON

NUM_SLOTS = 3
TEMPERATURES = (0.7, 1.3)


class Blocks:
    """Blocks of two requests that use rejection sampling."""

    def __init__(
        self,
        device: torch.device,
        *,
        vocab_size: int,
        draft_topk: int,
        dtype: torch.dtype = torch.float32,
        has_map: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(vocab_size)
        num_rows = NUM_SLOTS * len(TEMPERATURES)
        self.logits = (2 * torch.randn(num_rows, vocab_size, generator=generator)).to(device, dtype)
        self.temperature = torch.tensor(TEMPERATURES, device=device)
        self.seed = torch.tensor([3, 2**40 + 5], device=device)
        self.stream = torch.ones(2, dtype=torch.int32, device=device)
        self.starts = torch.tensor([40, 7], dtype=torch.int32, device=device)
        targets = torch.randperm(2 * vocab_size, generator=generator)[:vocab_size].sort().values
        self.draft_to_target = targets.to(device) if has_map else None
        self.draft_topk = draft_topk

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """[rows], [rows, C] and [rows, C]."""
        columns = (self.temperature, self.seed, self.stream, self.starts, self.draft_to_target)
        tokens, draft_topk_ids, draft_topk_probs = draft_tokens(self.logits, *columns, draft_topk=self.draft_topk)
        assert tokens.shape == (2, NUM_SLOTS) and draft_topk_ids.shape == draft_topk_probs.shape == (
            2,
            NUM_SLOTS * self.draft_topk,
        )
        assert tokens.dtype == draft_topk_ids.dtype == torch.int32
        flat = (x.view(len(self.logits), -1).cpu() for x in (tokens, draft_topk_ids, draft_topk_probs))
        tokens, draft_topk_ids, draft_topk_probs = flat
        return tokens[:, 0], draft_topk_ids, draft_topk_probs

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        def per_row(values: Tensor) -> Tensor:
            return values.cpu().repeat_interleave(NUM_SLOTS)

        return sample_topk(
            logits=self.logits.cpu().float(),
            seed=per_row(self.seed),
            position=per_row(self.starts).long() + torch.arange(1, NUM_SLOTS + 1).repeat(2),
            temperature=per_row(self.temperature),
            draft_to_target=None if self.draft_to_target is None else self.draft_to_target.cpu(),
            draft_topk=self.draft_topk,
        )


def assert_are_as_defined(blocks: Blocks) -> None:
    found, expected = blocks.found(), blocks.expected()
    assert [x.tolist() for x in found[:2]] == [x.tolist() for x in expected[:2]]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize(
    ("vocab_size", "draft_topk"), [(5, 5), (63, 32), (300, 1), (TILE, 7), (2 * TILE + 777, 32), (TILE + 1, 64)]
)
def test_drafts_candidates_and_probabilities_are_those_of_pytorch(
    device: torch.device, vocab_size: int, draft_topk: int, has_map: bool, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"vocab_size": vocab_size, "draft_topk": draft_topk}
    assert_are_as_defined(Blocks(device, has_map=has_map, dtype=dtype, **options))


def test_every_input_of_a_draw_counts(device: torch.device) -> None:
    """The negative controls."""
    first = Blocks(device, vocab_size=300, draft_topk=16, has_map=True).found()
    for name, index in {"seed": 0, "starts": 0, "temperature": 2, "draft_to_target": 1, "logits": 1}.items():
        blocks = Blocks(device, vocab_size=300, draft_topk=16, has_map=True)
        setattr(blocks, name, getattr(blocks, name) + 1 if name != "logits" else -blocks.logits)
        found = blocks.found()
        assert found[index].tolist() != first[index].tolist(), name
        assert_are_as_defined(blocks)
    blocks = Blocks(device, vocab_size=300, draft_topk=16, has_map=True)
    blocks.stream.zero_()
    tokens, draft_topk_ids, draft_topk_probs = blocks.found()  # in the target's noise, of the whole vocabulary
    assert tokens.tolist() != first[0].tolist() and not draft_topk_ids.any() and not draft_topk_probs.any()


def test_the_likeliest_tokens_may_be_in_one_piece_or_at_the_ends_of_many(device: torch.device) -> None:
    piece, blocks = TILE // PIECES, Blocks(device, vocab_size=2 * TILE, draft_topk=32)
    blocks.logits[0, piece : 2 * piece] += 50
    blocks.logits[1, piece - 1 :: piece] += 50
    blocks.logits[2, -32:] += 50
    blocks.logits[3] = 0.0  # all are tied
    blocks.logits[4] = torch.arange(2 * TILE, device=device) / 100
    blocks.logits[5] = -torch.arange(2 * TILE, device=device) / 100
    assert_are_as_defined(blocks)
    _, draft_topk_ids, _ = blocks.found()
    assert draft_topk_ids[3].tolist() == draft_topk_ids[5].tolist() == list(range(32))


def test_equal_logits_and_both_zeros_are_taken_in_the_order_of_tokens(device: torch.device) -> None:
    blocks = Blocks(device, vocab_size=2 * TILE, draft_topk=5, dtype=torch.float16)
    blocks.logits.fill_(-1.0)
    blocks.logits[:, [TILE + 1, 9, TILE + 5, 2 * TILE - 1]] = torch.tensor([0.0, -0.0, 0.0, -0.0]).to(blocks.logits)
    assert_are_as_defined(blocks)
    assert blocks.found()[1][0].tolist() == [9, TILE + 1, TILE + 5, 2 * TILE - 1, 0]


@ignores_infinities
def test_logits_that_are_not_finite_give_no_probabilities_and_a_draft_of_the_vocabulary(device: torch.device) -> None:
    blocks = Blocks(device, vocab_size=TILE + 3, draft_topk=8)
    blocks.logits[0] = torch.nan
    blocks.logits[1] = -torch.inf
    blocks.logits[2, 7] = torch.inf
    blocks.logits[3, 100:] = torch.nan  # is below every number
    assert_are_as_defined(blocks)
    tokens, draft_topk_ids, draft_topk_probs = blocks.found()
    assert not draft_topk_probs[:3].any() and int(draft_topk_ids.min()) >= 0 and int(draft_topk_ids.max()) < TILE + 3
    assert (draft_topk_ids == tokens[:, None]).any(dim=1).all()
    torch.testing.assert_close(draft_topk_probs[3:].sum(dim=1), torch.ones(3))


def test_other_requests_of_the_step_are_drafted_as_without_these(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("draft_topk_ids of a draft that has none")

    blocks = Blocks(device, vocab_size=300, draft_topk=16)
    apart = blocks.found()
    blocks.stream[0] = 0
    mixed = blocks.found()
    assert mixed[0][:NUM_SLOTS].tolist() != apart[0][:NUM_SLOTS].tolist()
    assert all(x[NUM_SLOTS:].tolist() == y[NUM_SLOTS:].tolist() for x, y in zip(mixed, apart, strict=True))
    blocks.temperature[1] = 0.0  # greedy, whatever its stream
    greedy = blocks.found()
    assert greedy[0][NUM_SLOTS:].tolist() == blocks.logits[NUM_SLOTS:].argmax(dim=1).tolist()
    assert greedy[0][:NUM_SLOTS].tolist() == mixed[0][:NUM_SLOTS].tolist() and not greedy[2].any()
    if KERNELS_ON == "interpreter":
        monkeypatch.setattr(argmax, "ranking_of", refuse)
        assert blocks.found()[0].tolist() == greedy[0].tolist()
        blocks.temperature[1] = 1.0
        with pytest.raises(Exception, match="draft_topk_ids of a draft that has none"):
            blocks.found()
