"""Tests of drafts, and draws from what they leave, in plain TensorRT layers, alone: read back and run on given rows."""

from dataclasses import fields, replace

import pytest
import torch

from dflash_trt.backends.tensorrt import lowering_philox, lowering_rejection
from dflash_trt.backends.tensorrt import lowering_sampling as trt_sampling
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.backends.torch.rejection import draw_apart
from dflash_trt.core.step_spec import STEP_INPUTS
from dflash_trt.network.ops import StepInputs
from tests.logit_rows import columns_off, rows_without_a_token
from tests.trt.test_sampling_rows import OUTPUTS, HostileInterpreter

VOCAB_SIZE, NUM_CHOICES, NUM_DRAFTS, NUM_REQUESTS = 90, 6, 3, 64
WIDTH = NUM_DRAFTS + 1


def make_sampler(trt):
    """An interpreter of `sample_and_accept` in an engine with drafts, and who must live as long."""
    logger = make_logger(trt)
    owner = trt.Builder(logger)
    layers = Layers(trt, owner.create_network(0), logger)
    logits = layers.add_input("logits", "float32", (-1, VOCAB_SIZE), ("N", "V"))
    inputs = {
        tensor.name: layers.add_input(tensor.name, tensor.dtype, [-1] * len(tensor.axes), tensor.axes)
        for tensor in STEP_INPUTS
    }
    acceptance = trt_sampling.sample_and_accept(layers, logits, StepInputs(**inputs), num_choices=NUM_CHOICES)
    for name in OUTPUTS:
        layers.mark_output(getattr(acceptance, name), name)
    return HostileInterpreter(trt, layers.network, {}), owner


@pytest.fixture(scope="module")
def sampler(trt):
    return make_sampler(trt)


def step_of(filters=None, *, temperature=0.8):
    """Logits of a target, and a step of requests whose drafts another model drew, apart but for every fourth request.

    They have 0 to 3 candidates. `filters` are values of the sampling columns.
    """
    generator = torch.Generator().manual_seed(2)
    target = 2 * torch.randn(NUM_REQUESTS * WIDTH, VOCAB_SIZE, generator=generator)
    requests = torch.arange(NUM_REQUESTS)
    columns = columns_off(NUM_REQUESTS) | {"seed": requests + 2**33, "draft_stream": (requests % 4 != 1).int()}
    columns["temperature"] = torch.where(requests % 8 // 2 == 2, 0.0, temperature)
    for name, value in (filters or {}).items():
        columns[name] = torch.full_like(columns[name], value)
    rows = torch.arange(NUM_REQUESTS * WIDTH, dtype=torch.int32).view(NUM_REQUESTS, WIDTH)
    context_lens = (10 + requests % 7).int()
    positions = context_lens[:, None] + torch.arange(WIDTH)
    drafted = target.view(NUM_REQUESTS, WIDTH, -1)[:, :-1].flatten(0, 1)
    drafted = drafted + 0.7 * torch.randn(drafted.shape, generator=generator)
    drafts, choices, chances = draw_apart(
        logits=drafted,
        seed=columns["seed"].repeat_interleave(NUM_DRAFTS),
        position=(positions[:, :-1] + 1).flatten(),
        temperature=torch.full((len(drafted),), temperature),
        draft_to_target=None,
        num_choices=NUM_CHOICES,
    )
    token_ids = torch.cat([torch.zeros(NUM_REQUESTS, 1), drafts.view(NUM_REQUESTS, -1)], 1).flatten().int()
    return target, StepInputs(
        token_ids=token_ids,
        positions=positions.flatten().int(),
        token_offsets=torch.arange(0, len(target) + 1, WIDTH, dtype=torch.int32),
        context_lens=context_lens,
        page_table=torch.zeros(NUM_REQUESTS, 1, dtype=torch.int32),
        logit_rows=rows,
        num_candidates=(NUM_DRAFTS - requests % 8 // 6).int(),
        choices=choices.view(NUM_REQUESTS, -1).int(),
        chances=chances.view(NUM_REQUESTS, -1),
        **columns,
    )


def run(sampler, logits, inputs):
    """What the layers give, and what torch gives."""
    named = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return sampler[0].run(named | {"logits": logits}), torch_sampling.sample_and_accept(logits, inputs)


def passed(tokens, inputs):
    """Of the tested drafts: which are the tokens of their rows."""
    is_tested = (inputs.draft_stream == 1)[:, None] & (torch.arange(NUM_DRAFTS) < inputs.num_candidates[:, None])
    is_tested &= inputs.temperature[:, None] > 0
    drafts = inputs.token_ids.view(NUM_REQUESTS, WIDTH)[:, 1:]
    return (tokens[:, :-1] == drafts)[is_tested]


def assert_same(found, expected):
    assert torch.equal(found["emitted_tokens"], expected.emitted_tokens)
    assert torch.equal(found["num_accepted"], expected.num_accepted)
    torch.testing.assert_close(found["emitted_logprobs"], expected.emitted_logprobs)


FILTERS = {
    "unfiltered": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "together": {"top_k": 8, "top_p": 0.8, "min_p": 0.05},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.7])
def test_tokens_and_accepted_drafts_are_torchs(sampler, filters, temperature):
    logits, inputs = step_of(filters, temperature=temperature)
    found, expected = run(sampler, logits, inputs)
    assert_same(found, expected)
    accepted = passed(expected.emitted_tokens, inputs).float().mean()
    assert 0.15 < accepted < 0.95
    unlike = torch_sampling.sample_and_accept(logits, replace(inputs, draft_stream=torch.zeros_like(inputs.seed)))
    assert not torch.equal(unlike.emitted_tokens, expected.emitted_tokens)  # the negative control


def test_drafts_without_a_chance_were_not_drawn(sampler):
    """Given by the host, with whatever tokens a slot had, or beside the choices."""
    logits, inputs = step_of()
    is_given = torch.arange(NUM_REQUESTS)[:, None] % 2 == 0
    stale = torch.where(is_given, torch.zeros_like(inputs.choices), inputs.choices)
    others = inputs.token_ids.clone().view(NUM_REQUESTS, WIDTH)
    others[::3] = (others[::3] + 31) % VOCAB_SIZE
    inputs = replace(inputs, choices=stale, chances=inputs.chances * ~is_given, token_ids=others.flatten())
    found, expected = run(sampler, logits, inputs)
    assert_same(found, expected)
    accepted = passed(expected.emitted_tokens, inputs)
    assert 0 < accepted.sum() < len(accepted)


def test_a_draft_of_the_targets_distribution_is_always_accepted(sampler):
    """The residual of others is only rounding."""
    logits, inputs = step_of({"top_k": NUM_CHOICES})
    drafted = logits.view(NUM_REQUESTS, WIDTH, -1)[:, :-1].flatten(0, 1)
    scores, choices = drafted.topk(NUM_CHOICES, dim=1)
    chances = (scores / 0.8).softmax(dim=1)
    drafts = choices.gather(1, torch.arange(len(choices))[:, None] % 3)
    token_ids = torch.cat([torch.zeros(NUM_REQUESTS, 1), drafts.view(NUM_REQUESTS, -1)], 1).flatten().int()
    given = {"choices": choices.view(NUM_REQUESTS, -1).int(), "chances": chances.view(NUM_REQUESTS, -1)}
    inputs = replace(inputs, token_ids=token_ids, **given)
    found, expected = run(sampler, logits, inputs)
    assert passed(found["emitted_tokens"], inputs).all() and passed(expected.emitted_tokens, inputs).all()
    assert torch.equal(found["num_accepted"], expected.num_accepted)


def test_rows_that_are_not_finite_have_the_log_probability_nan_and_their_mates_theirs(sampler):
    logits, inputs = step_of({"top_p": 0.9})
    bad = torch.stack(list(rows_without_a_token(VOCAB_SIZE).values()))
    is_bad = torch.arange(len(logits)) % 3 == 0
    logits[is_bad] = bad.repeat(len(logits), 1)[: int(is_bad.sum())]
    found, expected = run(sampler, logits, inputs)
    logprobs, tokens = found["emitted_logprobs"].flatten(), found["emitted_tokens"].flatten()
    assert logprobs[is_bad].isnan().all() and not logprobs[~is_bad].isnan().any()
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB_SIZE
    assert torch.equal(tokens[~is_bad], expected.emitted_tokens.flatten()[~is_bad])


def _test_with_the_noise_of_tokens(monkeypatch):
    monkeypatch.setattr(lowering_philox, "TESTS", 0)


def _take_the_choices_of_the_draft_before(monkeypatch):
    honest = lowering_rejection._by_row

    def shifted(layers, of_drafts, num_choices):
        by_row = layers.reshape(honest(layers, of_drafts, num_choices), (-1, WIDTH, num_choices))
        before = layers.gather(by_row, layers.ints([WIDTH - 1, *range(WIDTH - 1)], (WIDTH,)), 1)
        return layers.reshape(before, (-1, num_choices))

    monkeypatch.setattr(lowering_rejection, "_by_row", shifted)


def _leave_rejected_drafts_in_the_residual(monkeypatch):
    monkeypatch.setattr(lowering_rejection, "LOWEST", 0.0)


def _test_as_if_nothing_was_drawn(monkeypatch):
    monkeypatch.setattr(
        lowering_rejection.DrawnTests, "_chance_of_drafts", lambda self, layers: layers.floats([1.0], (1, 1))
    )


def _draw_from_the_target_again(monkeypatch):
    monkeypatch.setattr(Layers, "scatter_elements", lambda self, x, indices, updates, axis: x)


@pytest.mark.parametrize(
    "perturb",
    [
        _test_with_the_noise_of_tokens,
        _take_the_choices_of_the_draft_before,
        _leave_rejected_drafts_in_the_residual,
        _test_as_if_nothing_was_drawn,
        _draw_from_the_target_again,
    ],
)
def test_a_perturbed_lowering_gives_other_tokens(trt, monkeypatch, perturb):
    perturb(monkeypatch)
    found, expected = run(make_sampler(trt), *step_of())
    assert not torch.equal(found["emitted_tokens"], expected.emitted_tokens)
