"""Sampling at the ends of every number, and of rows that give no token, on the CPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.backends.step_inputs import step_inputs, step_result
from dflash_trt.backends.torch.sampling import filtered_weights, sample_and_accept
from dflash_trt.core.batch import ScheduledRequest, StepBatch, StepSampling, request_results
from dflash_trt.core.request import MAX_SEED, SamplingParams
from dflash_trt.network.step import StepOutputs
from tests.logit_rows import EXTREMES, device_sampling, rows_without_a_token

ORDER = (5, 0, 3, 7, 1, 6, 2, 4)  # tokens, the most likely first
STEPS = torch.tensor([-float(ORDER.index(token)) for token in range(len(ORDER))])
GREEDY, RANDOM, FILTERED = (
    StepSampling(),
    StepSampling(temperature=1.0, seed=3),
    StepSampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
)


def run(logits: torch.Tensor, samplings: list[StepSampling], *, num_candidates: int = 0):
    """A verify block for each sampling, of drafts 0, 1, ..: the results as every executor reads them."""
    rows = tuple(
        ScheduledRequest(
            request_id=str(index),
            token_ids=(9, *range(num_candidates)),
            context_len=20,
            num_candidates=num_candidates,
            page_ids=(0,) * 8,
            sampling=sampling,
        )
        for index, sampling in enumerate(samplings)
    )
    inputs = step_inputs(StepBatch(requests=rows, num_draft_tokens=num_candidates))
    return request_results(step_result(StepOutputs(acceptance=sample_and_accept(logits, inputs), proposal=None)))


def likely(logits: torch.Tensor, params: SamplingParams, margin: float) -> set[int]:
    """The definition in float64 numbers of Python; a positive margin takes what float32 may keep, a negative drops."""
    if params.temperature == 0.0:
        return {int(logits.argmax())}
    values = [float(x) for x in logits]
    ordered = sorted(range(len(values)), key=lambda token: -values[token])
    weights = [math.exp((values[token] - values[ordered[0]]) / params.temperature) for token in ordered]
    num_kept = params.top_k or len(ordered)
    total = sum(weights[:num_kept])
    kept = {ordered[0]}
    for rank, weight in enumerate(weights[:num_kept]):
        is_in_top_p = sum(weights[:rank]) < params.top_p * (1 + margin) * total or params.top_p == 1.0
        if is_in_top_p and weight >= params.min_p * (1 - margin) and (margin > 0 or weight > 1e-30):
            kept.add(ordered[rank])
    return kept


@st.composite
def sampling_params(draw) -> SamplingParams:
    ends = st.sampled_from
    return SamplingParams(
        temperature=draw(st.floats(0.0, 1e4) | ends([5e-324, 1e-300, 1e-45, 1e-40, 1e-38, 2e-38, 1e-20, 1e-7, 1e4])),
        top_k=draw(st.integers(0, 9) | ends([2**31 - 1, 2**31, 2**32, 2**63, 10**30])),
        top_p=draw(st.floats(0.0, 1.0, exclude_min=True) | ends([5e-324, 1e-300, 1e-45, 1e-38, 1 - 1e-9, 1.0])),
        min_p=draw(st.floats(0.0, 1.0) | ends([5e-324, 1e-300, 1e-40, 1 - 1e-9, 1.0])),
        seed=draw(st.integers(0, MAX_SEED) | ends([0, 2**31, 2**32, 2**53 + 1, MAX_SEED])),
    )


@settings(max_examples=300, deadline=None)
@given(params=sampling_params(), scale=st.sampled_from([0.5, 1.0, 30.0, 1e10, 4e37]))
def test_every_number_gives_a_token_that_means_what_was_asked(params: SamplingParams, scale: float) -> None:
    logits = STEPS * scale
    assert params.seed is not None
    (result,) = run(logits[None], [device_sampling(params, params.seed)])
    assert result.non_finite_position is None
    most = likely(logits, params, 1e-3)
    assert result.emitted_tokens[0] in most
    if params.temperature > 0.0:
        filters = {name: torch.tensor([getattr(params, name)]) for name in ("top_k", "top_p", "min_p")}
        kept = (
            filtered_weights((logits[None] - logits.max()) / params.temperature, **filters)[0].nonzero()[:, 0].tolist()
        )
        assert likely(logits, params, -1e-3) <= set(kept) <= most


@pytest.mark.parametrize(("params", "num_likely"), EXTREMES)
def test_extremes_draw_from_the_most_likely_tokens(params: SamplingParams, num_likely: int | None) -> None:
    results = run(STEPS.expand(200, -1), [device_sampling(params, seed) for seed in range(200)])
    drawn = {row.emitted_tokens[0] for row in results}
    if num_likely is None:
        assert len(drawn) > 4
    else:
        assert drawn == set(ORDER[:num_likely])


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, FILTERED])
@pytest.mark.parametrize("name", rows_without_a_token(300))
def test_a_row_that_is_not_finite_gives_no_token_and_its_mates_theirs(name: str, sampling: StepSampling) -> None:
    good = torch.randn(300, generator=torch.Generator().manual_seed(1))
    before, bad, after = run(torch.stack([good, rows_without_a_token(300)[name], good]), [sampling] * 3)
    (alone,) = run(good[None], [sampling])
    assert before == after == alone
    assert (bad.emitted_tokens, bad.logprobs, bad.num_accepted) == ((), (), 0)
    assert bad.non_finite_position == 20


def test_some_tokens_of_probability_0_are_no_fault() -> None:
    logits = torch.full((1, 300), -math.inf).index_fill(1, torch.tensor([7]), 2.0)
    for sampling in (GREEDY, RANDOM, FILTERED):
        (result,) = run(logits, [sampling])
        assert (result.emitted_tokens, result.logprobs) == ((7,), (0.0,))


@pytest.mark.parametrize(("bad_row", "emitted"), [(0, ()), (1, (0,)), (2, (0, 1)), (3, (0, 1, 5))])
def test_tokens_before_the_first_bad_row_are_kept(bad_row: int, emitted: tuple[int, ...]) -> None:
    """Drafts 0, 1, 2; the target says 0, 1, 5, and the last row is never looked at."""
    logits = torch.zeros(4, 8)
    for row, token in enumerate((0, 1, 5, 6)):
        logits[row, token] = 9.0
    logits[bad_row, 4] = math.nan
    (result,) = run(logits, [GREEDY], num_candidates=3)
    assert result.emitted_tokens == emitted
    if bad_row == 3:
        assert (result.num_accepted, result.non_finite_position) == (2, None)
    else:
        assert (result.num_accepted, result.non_finite_position) == (bad_row, 20 + bad_row)
        assert result.next_context_len == 21 + bad_row
        assert len(result.logprobs) == len(emitted)
