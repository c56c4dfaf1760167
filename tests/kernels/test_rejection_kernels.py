"""The sampler's rejection sampling against its definition in PyTorch, row by row."""

from dataclasses import replace

import pytest
import torch

from dflash_trt.backends.torch import sampling as torch_sampling
from dflash_trt.kernels import rejection
from dflash_trt.kernels.sampling_scratch import TILE
from tests.kernels.rejection_drafts import with_rejection_sampling
from tests.kernels.test_sampling_kernels import (
    VOCAB_SIZE,
    assert_same,
    ignores_infinities,
    make_inputs,
    make_logits,
    network_inputs,
    run_kernels,
    run_kernels_in_workspace,
)
from tests.logit_rows import rows_without_a_token

UNTESTED, ACCEPTED, REJECTED = (x.value for x in (rejection.UNTESTED, rejection.ACCEPTED, rejection.REJECTED))
NOT_FILTERED = (0, 1.0, 0.0)
FILTERS = {
    "none": NOT_FILTERED,
    "top_k": (20, 1.0, 0.0),
    "top_p": (0, 0.8, 0.0),
    "min_p": (0, 1.0, 0.1),
    "all": (30, 0.9, 0.02),
}


def make_step(filters=NOT_FILTERED, *, num_requests=8, width=4, vocab_size=300, draft_topk=16, **options):
    """Inputs and logits; seeds, temperatures and positions differ."""
    samplings = [(0.6 + 0.2 * i, *filters, 2**33 * i + 7) for i in range(num_requests)]
    inputs = make_inputs(samplings, width=width)
    inputs = replace(inputs, token_ids=inputs.token_ids % vocab_size)
    logits = make_logits(num_requests * width, vocab_size, dtype=options.pop("dtype", torch.float32), seed=3)
    return with_rejection_sampling(inputs, logits, draft_topk=draft_topk, **options), logits


def expected_of(inputs, logits):
    return torch_sampling.sample_and_accept(logits, network_inputs(inputs))


def outcomes(workspace, inputs):
    return workspace["row_outcome"].view(inputs.logit_rows.shape)


@pytest.mark.parametrize("name", FILTERS)
def test_drafts_are_tested_as_defined_under_every_filter(name):
    inputs, logits = make_step(FILTERS[name])
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    found = outcomes(workspace, inputs)
    assert (found[:, :-1] == ACCEPTED).sum() > 3 and (found[:, :-1] == REJECTED).sum() > 3
    assert (found[:, -1] == UNTESTED).all()  # no draft is there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("draft_topk", "spread"), [(32, 0.02), (5, 1.0), (1, 1.0), (64, 1.0)])
def test_any_number_of_candidates_in_several_tiles_will_do(draft_topk, spread, dtype):
    inputs, logits = make_step(num_requests=4, vocab_size=VOCAB_SIZE, draft_topk=draft_topk, dtype=dtype)
    logits *= spread  # of flat rows nearly every draft is rejected, and its row's token is anywhere
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    is_rejected = outcomes(workspace, inputs) == REJECTED
    assert is_rejected.any()
    if spread < 1:  # and hardly ever one of the candidates
        assert len(set((outputs.emitted_tokens[is_rejected] // TILE).tolist())) > 1
        return
    others = run_kernels(logits, replace(inputs, draft_stream=torch.zeros_like(inputs.draft_stream)))
    assert others.emitted_tokens.tolist() != outputs.emitted_tokens.tolist()


def test_every_part_of_the_test_counts():
    """The negative controls: probabilities, candidates, drafts and the seed each change some token."""
    inputs, logits = make_step(width=6)
    tokens = run_kernels(logits, inputs).emitted_tokens.tolist()
    assert tokens == expected_of(inputs, logits).emitted_tokens.tolist()
    for name, value in {
        "draft_topk_probs": inputs.draft_topk_probs.flip(1),
        "draft_topk_ids": inputs.draft_topk_ids.flip(1),
        "token_ids": (inputs.token_ids + 1) % 300,
        "seed": inputs.seed + 1,
    }.items():
        changed = replace(inputs, **{name: value.contiguous()})
        found = run_kernels(logits, changed).emitted_tokens.tolist()
        assert found != tokens, name
        assert found == expected_of(changed, logits).emitted_tokens.tolist(), name


@pytest.mark.parametrize("stale", [0.0, 1.0])
def test_a_draft_outside_its_candidates_has_probability_1(stale):
    """Drafts that the host gave have candidates that mean nothing, all of no probability."""
    inputs, logits = make_step()
    if stale:
        inputs = replace(inputs, token_ids=(inputs.token_ids + 150) % 300)  # beside what has probabilities
    else:
        inputs = replace(inputs, draft_topk_probs=torch.zeros_like(inputs.draft_topk_probs))
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    found = outcomes(workspace, inputs)[:, :-1]
    assert (found == REJECTED).any()
    assert stale or (found == ACCEPTED).any()
    rejected = outputs.emitted_tokens[:, :-1][found == REJECTED]
    drafts = inputs.token_ids[inputs.logit_rows[:, :-1].long() + 1][found == REJECTED]
    assert (rejected != drafts).all()


def test_where_rounding_leaves_no_residual_the_token_is_one_that_is_kept():
    inputs, logits = make_step((5, 1.0, 0.0), draft_topk=8, error=0.0)
    greater = replace(
        inputs, draft_topk_probs=inputs.draft_topk_probs * 4
    )  # than the target's, of all that top_k keeps
    outputs, workspace = run_kernels_in_workspace(logits, greater)
    assert_same(outputs, expected_of(greater, logits))
    is_rejected = outcomes(workspace, inputs)[:, :-1] == REJECTED
    assert is_rejected.sum() > 3
    kept = logits.topk(5, dim=1).indices.view(len(inputs.seed), -1, 5)[:, :-1]
    assert (kept == outputs.emitted_tokens[:, :-1, None]).any(dim=2)[is_rejected].all()


def test_candidates_that_are_not_kept_are_never_the_token():
    """min_p leaves one token, and the residual is its own where it is no choice."""
    inputs, logits = make_step((0, 1.0, 1.0), error=3.0)
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    assert outputs.emitted_tokens.flatten().tolist() == logits.argmax(dim=1).tolist()
    assert (outcomes(workspace, inputs) == REJECTED).any()


def test_requests_of_every_kind_share_a_step():
    """Greedy ones, those whose drafts share the noise, a prompt, fewer drafts than others."""
    samplings = [(0.0, 0, 1.0, 0.0, 1), (1.0, 0, 0.9, 0.0, 2), (1.0, 0, 1.0, 0.0, 3), (0.8, 40, 1.0, 0.0, 4)] * 2
    counts = [0, 3, 3, 3, 3, 1, 2, 0]
    inputs = make_inputs(samplings, width=4, num_candidates=counts, prefill_len=9)
    inputs = replace(inputs, token_ids=inputs.token_ids % 300)
    logits = make_logits(32, 300)
    stream = torch.tensor([0, 1, 0, 1, 0, 1, 1, 1], dtype=torch.int32)
    inputs = with_rejection_sampling(inputs, logits, draft_topk=16, draft_stream=stream)
    outputs, workspace = run_kernels_in_workspace(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    tested = (outcomes(workspace, inputs) != UNTESTED).sum(dim=1)
    assert tested.tolist() == [count * int(drawn) for count, drawn in zip(counts, stream.tolist(), strict=True)]


@pytest.mark.parametrize("columns", [None, 0])
def test_a_step_without_candidates_tests_no_draft(columns):
    inputs, logits = make_step()
    empty = None if columns is None else inputs.draft_topk_probs[:, :0].contiguous()
    changed = replace(inputs, draft_topk_ids=None if empty is None else empty.int(), draft_topk_probs=empty)
    shared = replace(changed, draft_stream=torch.zeros_like(inputs.draft_stream))
    assert_same(run_kernels(logits, changed), run_kernels(logits, shared))


def test_a_step_of_no_drafts_takes_candidates_of_no_width():
    inputs, logits = make_step(width=1)
    assert inputs.draft_topk_ids.shape == (8, 0)
    assert_same(run_kernels(logits, inputs), expected_of(inputs, logits))


@ignores_infinities
def test_rows_that_give_no_token_have_the_log_probability_nan_and_their_mates_theirs():
    bad = list(rows_without_a_token(300).values())
    inputs, logits = make_step(num_requests=len(bad), width=2)
    logits[0::2] = torch.stack(bad)
    outputs = run_kernels(logits, inputs)
    expected = expected_of(inputs, logits)
    assert outputs.emitted_logprobs[:, 0].isnan().all()
    assert all(0 <= token < 300 for token in outputs.emitted_tokens[:, 0].tolist())
    assert outputs.emitted_tokens[:, 1].tolist() == expected.emitted_tokens[:, 1].tolist()


@ignores_infinities
def test_probabilities_of_a_drafter_without_a_distribution_are_zeros():
    inputs, logits = make_step(width=2)
    zeros = replace(
        inputs,
        draft_topk_probs=torch.zeros_like(inputs.draft_topk_probs),
        draft_topk_ids=torch.zeros_like(inputs.draft_topk_ids),
    )
    assert_same(run_kernels(logits, zeros), expected_of(zeros, logits))


@ignores_infinities
def test_masked_tokens_are_never_drawn_from_the_residual():
    inputs, logits = make_step()
    logits[:, 40:] = -torch.inf
    outputs = run_kernels(logits, inputs)
    assert_same(outputs, expected_of(inputs, logits))
    assert int(outputs.emitted_tokens.max()) < 40


def test_steps_without_such_drafts_read_no_candidate(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a number for no test")

    inputs, logits = make_step(num_requests=2, width=2)
    shared = replace(inputs, draft_stream=torch.zeros_like(inputs.draft_stream))
    expected = run_kernels(logits, shared)
    monkeypatch.setattr(rejection, "test_number", refuse)
    assert_same(run_kernels(logits, shared), expected)
    with pytest.raises(Exception, match="a number for no test"):
        run_kernels(logits, inputs)
