"""The sampler in plain TensorRT layers, alone: read back and run on rows and numbers that a model seldom gives."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from dflash_trt.backends.step_inputs import step_inputs
from dflash_trt.backends.tensorrt import lowering_sampling as trt_sampling
from dflash_trt.backends.tensorrt.layers import Layers
from dflash_trt.backends.tensorrt.module import make_logger
from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling
from dflash_trt.core.step_spec import DRAFT_INPUTS, STEP_INPUTS
from dflash_trt.network.ops import StepInputs
from tests.logit_rows import EXTREMES, device_sampling, rows_without_a_token
from tests.trt.interpreter import NetworkInterpreter

VOCAB_SIZE = 300
OUTPUTS = ("emitted_tokens", "emitted_logprobs", "num_accepted")


class HostileInterpreter(NetworkInterpreter):
    """TensorRT does not say what TopK makes of NaN: here its index is far outside."""

    def _topk(self, layer):
        honest = super()._topk(layer)

        def top1(given):
            value, index = honest(given)
            return [value, torch.where(given[0].isnan().any(1, keepdim=True), 2**31 - 1, index)]

        return top1


@pytest.fixture(scope="module")
def layers(trt):
    logger = make_logger(trt)
    owner = trt.Builder(logger)
    made = Layers(trt, owner.create_network(0), logger)
    yield made
    del owner


@pytest.fixture(scope="module")
def sampler(trt, layers):
    """logits [R, VOCAB_SIZE] and the inputs of a step of R requests without drafts -> OUTPUTS."""
    logits = layers.add_input("logits", "float32", (-1, VOCAB_SIZE), ("R", "V"))
    sizes = {"R": -1, "R+1": -1, "T": -1, "K+1": 1, "P": -1}
    inputs = {
        tensor.name: layers.add_input(tensor.name, tensor.dtype, [sizes[axis] for axis in tensor.axes], tensor.axes)
        for tensor in STEP_INPUTS
        if tensor.name not in DRAFT_INPUTS
    }
    acceptance = trt_sampling.sample_and_accept(layers, logits, StepInputs(**inputs))
    for name in OUTPUTS:
        layers.mark_output(getattr(acceptance, name), name)
    return HostileInterpreter(trt, layers.network, {})


def run(sampler, logits, samplings):
    """What the layers give, and what torch gives."""
    requests = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=(9,),
            context_len=20,
            num_candidates=0,
            page_ids=(0,) * 8,
            sampling=sampling,
        )
        for index, sampling in enumerate(samplings)
    )
    inputs = step_inputs(StepBatch(requests=requests, num_draft_tokens=0))
    named = {item.name: getattr(inputs, item.name) for item in fields(inputs)}
    return sampler.run(named | {"logits": logits}), torch_sampling.sample_and_accept(logits, inputs)


@pytest.mark.parametrize(
    "sampling", [StepSampling(), StepSampling(temperature=1.0), StepSampling(temperature=0.7, top_k=5, top_p=0.9)]
)
def test_rows_that_are_not_finite_have_the_log_probability_nan_and_their_mates_theirs(sampler, sampling):
    bad = list(rows_without_a_token(VOCAB_SIZE).values())
    good = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found, expected = run(
        sampler, torch.stack([row for pair in bad for row in (pair, good)]), [sampling] * 2 * len(bad)
    )
    assert found["emitted_logprobs"][::2].isnan().all() and expected.emitted_logprobs[::2].isnan().all()
    tokens = found["emitted_tokens"].flatten()
    assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB_SIZE
    assert torch.equal(tokens[1::2], expected.emitted_tokens.flatten()[1::2])
    torch.testing.assert_close(found["emitted_logprobs"][1::2], expected.emitted_logprobs[1::2])


def test_the_ends_of_every_number_mean_what_they_mean_in_torch(sampler):
    samplings = [device_sampling(params, seed) for params, _ in EXTREMES for seed in range(8)]
    most_likely = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    row = torch.empty(VOCAB_SIZE).index_copy_(0, most_likely, -torch.arange(float(VOCAB_SIZE)))
    for scale in (1.0, 1e36):
        found, expected = run(sampler, row.expand(len(samplings), -1) * scale, samplings)
        assert torch.equal(found["emitted_tokens"], expected.emitted_tokens)
        torch.testing.assert_close(found["emitted_logprobs"], expected.emitted_logprobs)


TARGETS = torch.randperm(1000, generator=torch.Generator().manual_seed(4))[:VOCAB_SIZE].sort().values


@pytest.fixture(scope="module", params=[False, True], ids=["shared vocabulary", "draft vocabulary"])
def drafter(trt, request):
    """logits [R*K, VOCAB_SIZE] and a step's inputs -> draft_tokens; the draft vocabulary's ids or None."""
    logger = make_logger(trt)
    owner = trt.Builder(logger)
    layers = Layers(trt, owner.create_network(0), logger)
    logits = layers.add_input("logits", "float32", (-1, VOCAB_SIZE), ("N", "V"))
    inputs = {
        name: layers.add_input(name, dtype, (-1,), ("R",))
        for name, dtype in (("temperature", "float32"), ("seed", "int64"), ("next_context_lens", "int32"))
    }
    step = SimpleNamespace(**inputs)
    targets = layers.ints(TARGETS.tolist(), (VOCAB_SIZE,), "int64") if request.param else None
    slots = layers.binary("DIV", layers.dim(logits, 0), layers.dim(step.seed, 0))
    drafts = trt_sampling.draft_tokens(layers, logits, step.next_context_lens, targets, step, slots)
    layers.mark_output(drafts, "tokens")
    yield HostileInterpreter(trt, layers.network, {}), TARGETS if request.param else None
    del owner


def drafts(drafter, logits, seed=3):
    """Two requests, one of them greedy: what the layers give, and what torch gives."""
    interpreter, targets = drafter
    inputs = {"temperature": torch.tensor([0.0, 0.9]), "seed": torch.tensor([seed, 2**40 + seed])}
    inputs |= {"next_context_lens": torch.tensor([7, 90], dtype=torch.int32)}
    acceptance = SimpleNamespace(next_context_lens=inputs["next_context_lens"])
    expected = torch_sampling.draft_tokens(
        logits, SimpleNamespace(**inputs, draft_stream=torch.zeros(2)), acceptance, targets, num_choices=4
    ).tokens
    return interpreter.run(inputs | {"logits": logits})["tokens"], expected


def test_drafts_are_torchs(drafter):
    logits = torch.randn(10, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    found, expected = drafts(drafter, logits)
    assert found.dtype == torch.int32 and found.tolist() == expected.tolist()
    other, _ = drafts(drafter, logits, seed=4)  # the negative control
    assert other[0].tolist() == found[0].tolist() and other[1].tolist() != found[1].tolist()


def test_drafts_of_nan_are_tokens_of_the_vocabulary(drafter):
    rows = torch.stack([*rows_without_a_token(VOCAB_SIZE).values(), *torch.arange(2.0 * VOCAB_SIZE).view(2, -1)])
    found, expected = drafts(drafter, rows)
    assert int(found.min()) >= 0 and int(found.max()) < 1000
    assert found[1, -2:].tolist() == expected[1, -2:].tolist()
