"""The sampler in plain TensorRT layers, alone: read back and run on rows and numbers that a model seldom gives."""

from dataclasses import fields

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


def test_tokens_of_equal_probability_count_once_each_for_top_p_and_stay_or_go_together(sampler):
    """Few levels of logits, so that top_k cuts through ties: top_p then counts only as many of them as top_k wants."""
    generator = torch.Generator().manual_seed(3)
    samplings, rows = [], []
    for seed in range(400):
        levels = (
            torch.randint(0, 4, (VOCAB_SIZE,), generator=generator).float() * torch.rand(1, generator=generator) * 3
        )
        levels[torch.randint(0, VOCAB_SIZE, (1,), generator=generator)] += 4 * torch.rand(1, generator=generator)
        top_k = int(torch.randint(1, 120, (1,), generator=generator))
        top_p = 0.05 + 0.9 * float(torch.rand(1, generator=generator))
        samplings.append(StepSampling(temperature=1.0, top_k=top_k, top_p=top_p, seed=seed))
        rows.append(levels)
    found, expected = run(sampler, torch.stack(rows), samplings)
    assert torch.equal(found["emitted_tokens"], expected.emitted_tokens)
    torch.testing.assert_close(found["emitted_logprobs"], expected.emitted_logprobs)
