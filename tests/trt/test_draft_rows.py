"""Draws of drafts in plain TensorRT layers, alone: of both streams in one step, read back and run."""

from types import SimpleNamespace

import pytest
import torch

from dflash_trt.backends.tensorrt import lowering_drafts, lowering_philox
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.network.proposal import Proposal
from tests.logit_rows import rows_without_a_token
from tests.trt.test_sampling_rows import VOCAB_SIZE, HostileInterpreter

TARGETS = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:VOCAB_SIZE].sort().values
NUM_CHOICES = 4
COLUMNS = (("temperature", "float32"), ("seed", "int64"), ("draft_stream", "int32"), ("next_context_lens", "int32"))


def make_drafter(trt, has_map):
    """An interpreter of `draft_tokens`; the draft vocabulary's ids or None; who must live as long."""
    logger = make_logger(trt)
    owner = trt.Builder(logger)
    layers = Layers(trt, owner.create_network(0), logger)
    logits = layers.add_input("logits", "float32", (-1, VOCAB_SIZE), ("N", "V"))
    step = SimpleNamespace(**{name: layers.add_input(name, dtype, (-1,), ("R",)) for name, dtype in COLUMNS})
    targets = layers.ints(TARGETS.tolist(), (VOCAB_SIZE,), "int64") if has_map else None
    slots = layers.binary("DIV", layers.dim(logits, 0), layers.dim(step.seed, 0))
    given = (layers, logits, step.next_context_lens, targets, step, slots)
    made = lowering_drafts.draft_tokens(*given, num_choices=NUM_CHOICES)
    for name in Proposal.__dataclass_fields__:
        layers.mark_output(getattr(made, name), name)
    return HostileInterpreter(trt, layers.network, {}), TARGETS if has_map else None, owner


@pytest.fixture(scope="module", params=[False, True], ids=["shared vocabulary", "draft vocabulary"])
def drafter(trt, request):
    return make_drafter(trt, request.param)


def drafts(drafter, logits, *, seed=3, streams=(0, 0)):
    """Two requests, the first of them greedy unless it draws apart: what the layers give, and what torch gives."""
    interpreter, targets, _ = drafter
    inputs = {"temperature": torch.tensor([0.4 * streams[0], 0.9]), "seed": torch.tensor([seed, 2**40 + seed])}
    inputs |= {"draft_stream": torch.tensor(streams, dtype=torch.int32)}
    inputs |= {"next_context_lens": torch.tensor([7, 90], dtype=torch.int32)}
    acceptance = SimpleNamespace(next_context_lens=inputs["next_context_lens"])
    step = SimpleNamespace(**inputs)
    expected = torch_sampling.draft_tokens(logits, step, acceptance, targets, num_choices=NUM_CHOICES)
    return Proposal(**interpreter.run(inputs | {"logits": logits})), expected


LOGITS = torch.randn(10, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("streams", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_drafts_and_what_they_were_drawn_from_are_torchs(drafter, streams):
    found, expected = drafts(drafter, LOGITS, streams=streams)
    assert found.tokens.dtype == torch.int32 and found.tokens.tolist() == expected.tokens.tolist()
    assert (found.choices.dtype, found.chances.dtype) == (torch.int32, torch.float32)
    assert found.choices.shape == found.chances.shape == (2, 5 * NUM_CHOICES)
    for request in range(2):
        if streams[request]:
            assert found.choices[request].tolist() == expected.choices[request].tolist()
            torch.testing.assert_close(found.chances[request], expected.chances[request])


def test_a_seed_and_a_stream_have_noise_of_their_own(drafter):
    """The negative control of the equal drafts."""
    found, _ = drafts(drafter, LOGITS)
    for other, _ in (drafts(drafter, LOGITS, seed=4), drafts(drafter, LOGITS, streams=(0, 1))):
        assert other.tokens[0].tolist() == found.tokens[0].tolist()
        assert other.tokens[1].tolist() != found.tokens[1].tolist()


@pytest.mark.parametrize("streams", [(0, 0), (1, 1)])
def test_drafts_of_nan_are_tokens_of_the_vocabulary_and_have_torchs_chances(drafter, streams):
    rows = torch.stack([*rows_without_a_token(VOCAB_SIZE).values(), *torch.arange(2.0 * VOCAB_SIZE).view(2, -1)])
    found, expected = drafts(drafter, rows, streams=streams)
    for tokens in (found.tokens, found.choices):
        assert int(tokens.min()) >= 0 and int(tokens.max()) < 1000
    assert found.tokens[1, -2:].tolist() == expected.tokens[1, -2:].tolist()
    if streams[0]:
        torch.testing.assert_close(found.chances, expected.chances)
        totals = found.chances.view(10, NUM_CHOICES).sum(1)
        assert 0 < (totals == 0).sum() < 10  # some give a distribution, some give none
        has_chances = totals.view(2, 5) > 0
        assert found.tokens[has_chances].tolist() == expected.tokens[has_chances].tolist()


@pytest.mark.parametrize("change", ["a word", "a temperature"])
def test_a_perturbed_draw_is_noticed(trt, monkeypatch, change):
    if change == "a word":
        honest = lowering_philox._words
        monkeypatch.setattr(
            lowering_philox,
            "_words",
            lambda layers, seed, position, quads, streams: honest(layers, seed, position, quads, None),
        )
    else:
        honest = lowering_drafts.chances_of
        monkeypatch.setattr(
            lowering_drafts,
            "chances_of",
            lambda layers, scores, temperature: honest(layers, scores, layers.like(1.0, temperature)),
        )
    found, expected = drafts(make_drafter(trt, has_map=False), LOGITS, streams=(1, 1))
    assert (found.tokens.tolist() != expected.tokens.tolist()) == (change == "a word")
    assert torch.allclose(found.chances, expected.chances, atol=1e-5) == (change == "a word")
