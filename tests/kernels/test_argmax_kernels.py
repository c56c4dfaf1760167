"""Drafts straight from low-precision logits, however the vocabulary is cut: greedy, and with the target's noise.

`test_draft_topk_kernels.py` has drafts for rejection sampling.
"""

import pytest
import torch

from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.kernels import argmax
from dflash_trt.kernels.argmax import combine_argmax_kernel
from dflash_trt.kernels.sampling_launch import draft_tokens
from dflash_trt.kernels.sampling_scratch import PIECES, TILE
from dflash_trt.network.ops import Acceptance
from tests.kernels import reference_sampling
from tests.kernels.test_sampling_kernels import make_inputs, network_inputs
from tests.kernels_on import DEVICE


def make_logits(num_rows, vocab_size, *, dtype=torch.float32, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def shared_drafts(logits, temperature, seed, next_context_lens, draft_to_target=None):
    """Of requests whose drafts share the target's noise."""
    stream = torch.zeros_like(next_context_lens)
    choice = {"draft_topk": min(4, logits.shape[1])}
    tokens, _, draft_topk_probs = draft_tokens(
        logits, temperature, seed, stream, next_context_lens, draft_to_target, **choice
    )
    assert not draft_topk_probs.any()
    return tokens


def drafts(logits, temperatures, *, draft_to_target=None, run=shared_drafts, seed=3, start=40):
    """Blocks of requests with these temperatures, each with a seed and a start of its own."""
    steps = torch.arange(len(temperatures), device=DEVICE)
    degrees = torch.tensor(temperatures, dtype=torch.float32, device=DEVICE)
    return run(logits, degrees, seed + 2**40 * steps, (start + 9 * steps).int(), draft_to_target).cpu()


def greedy(logits):
    return drafts(logits, [0.0]).flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 272, TILE - 1, TILE, 3 * TILE + 1])
def test_a_greedy_draft_is_the_first_largest(vocab_size, dtype):
    logits = make_logits(5, vocab_size, dtype=dtype)
    tokens = drafts(logits, [0.0])
    assert tokens.dtype == torch.int32 and tokens.shape == (1, 5)
    assert tokens.flatten().tolist() == logits.argmax(dim=1).tolist()


def test_ties_go_to_the_smallest_index_across_tiles():
    logits = torch.full((3, 3 * TILE), -1.0, device=DEVICE)
    logits[0, [TILE + 7, TILE + 8, 2 * TILE + 1]] = 0.5
    logits[2] = -torch.inf
    assert greedy(logits) == reference_sampling.argmax_tokens(logits).tolist() == [TILE + 7, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("vocab_size", [1, 272, TILE, TILE + 1, 2 * TILE])
def test_nan_is_below_every_number_so_that_the_token_is_in_the_vocabulary(vocab_size, temperature):
    logits = make_logits(3, vocab_size)
    logits[0] = torch.nan
    logits[1, : vocab_size // 2] = torch.nan
    logits[2] = torch.nan
    logits[2, -1] = -1e30
    tokens = drafts(logits, [temperature])
    assert tokens.tolist() == drafts(logits, [temperature], run=reference_sampling.draft_tokens).tolist()
    assert tokens[0, 0] < vocab_size and tokens[0, 2] == vocab_size - 1


@pytest.mark.parametrize("num_tiles", [1, 3])
def test_tiles_without_a_token_give_one_of_the_vocabulary(num_tiles):
    """Whatever a GPU's maximum made of NaN in the tiles."""
    vocab_size, token = num_tiles * TILE, torch.empty(1, dtype=torch.int32, device=DEVICE)
    nothing = torch.full((1, num_tiles), torch.nan, device=DEVICE)
    no_index = torch.full((1, num_tiles), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    zeros, choice = torch.zeros(1, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    of_request = (nothing, zeros, choice.long(), choice, choice, choice.long())
    constants = {"HAS_MAP": False, "TILE": TILE, "TILES": 4, "PIECES": PIECES, "DRAFT_TOPK": 32}
    sizes = (vocab_size, 1, num_tiles, 1)
    combine_argmax_kernel[(1,)](
        *of_request, nothing, no_index, choice.long(), token, choice, zeros, *sizes, **constants
    )
    assert 0 <= int(token) < vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 63, 272, TILE, 2 * TILE + 777])
def test_drafts_of_requests_with_a_temperature_are_those_of_the_definition(vocab_size, dtype):
    temperatures = (0.0, 0.8, 1.3)
    logits = make_logits(12, vocab_size, dtype=dtype)
    tokens = drafts(logits, temperatures)
    assert tokens.tolist() == drafts(logits, temperatures, run=reference_sampling.draft_tokens).tolist()
    assert tokens[0].tolist() == logits[:4].argmax(dim=1).tolist()
    if vocab_size > 63:
        for change in ({"seed": 4}, {"start": 41}):
            other = drafts(logits, temperatures, **change)
            assert other[0].tolist() == tokens[0].tolist() and other[1:].tolist() != tokens[1:].tolist()


def test_a_draft_vocabulary_is_drawn_in_the_noise_of_the_targets_tokens():
    to_target = torch.randperm(3 * TILE, generator=torch.Generator().manual_seed(1))[: TILE + 99].sort().values
    logits = make_logits(8, len(to_target))
    tokens = drafts(logits, [0.0, 1.0], draft_to_target=to_target.to(DEVICE))
    expected = drafts(logits, [0.0, 1.0], draft_to_target=to_target, run=reference_sampling.draft_tokens)
    assert tokens.tolist() == expected.tolist()
    unmapped = to_target[drafts(logits, [0.0, 1.0]).long()]  # the negative control: noise of the draft's own ids
    assert tokens[0].tolist() == unmapped[0].tolist() and tokens[1].tolist() != unmapped[1].tolist()


@pytest.mark.parametrize("vocab_size", [63, TILE + 5])
def test_drafts_of_the_target_s_own_logits_are_what_the_target_is_sampled_to(vocab_size):
    """Shared noise: a drafter that is the target is always accepted."""
    samplings = [(0.0, 0, 1.0, 0.0, 1), (1.0, 0, 1.0, 0.0, 2**40 + 5), (0.7, 0, 1.0, 0.0, 9)]
    width = 4
    inputs = make_inputs(samplings, width=width)  # the request's own positions follow its context
    logits = make_logits(len(samplings) * width, vocab_size)
    expected = torch_sampling.sample_and_accept(logits.cpu(), network_inputs(inputs)).emitted_tokens
    starts = inputs.context_lens  # row j is at position start + j, and its token at start + j + 1
    arguments = [x.to(DEVICE) for x in (inputs.temperature, inputs.seed, starts)]
    assert shared_drafts(logits, *arguments).tolist() == expected.tolist()
    acceptance = Acceptance(**dict.fromkeys(Acceptance.__dataclass_fields__, starts))
    found = torch_sampling.draft_tokens(logits.cpu(), network_inputs(inputs), acceptance, None, draft_topk=4).tokens
    assert found.tolist() == expected.tolist()


def test_greedy_rows_do_not_make_noise(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("noise for a greedy row")

    logits = make_logits(4, 300)
    expected = greedy(logits)
    monkeypatch.setattr(argmax, "noise_of_range", refuse)
    assert greedy(logits) == expected
    with pytest.raises(Exception, match="noise for a greedy row"):
        drafts(logits, [1.0])
