"""Acceptance over finished requests."""

from dataclasses import replace

import pytest

from dflash_trt.core.acceptance import acceptance_length, accepted_fractions, specdec_bench_acceptance_length
from dflash_trt.core.request import GenerationOutput, TokenEvent


def output(*blocks: tuple[int, int], num_tokens: int = 3) -> GenerationOutput:
    """A request whose verify steps had these (candidates, accepted); its first token came after 2 s, the last at 5."""
    return GenerationOutput(
        request_id="r",
        text=None,
        token_ids=(1,) * num_tokens,
        logprobs=(),
        finish_reason="length",
        num_prompt_tokens=1,
        num_verify_steps=len(blocks),
        num_draft_tokens=sum(candidates for candidates, _ in blocks),
        num_accepted_tokens=sum(accepted for _, accepted in blocks),
        num_emitted_by_verify=sum(accepted + 1 for _, accepted in blocks),
        time_to_first_token_s=2.0,
        total_s=5.0,
        steps=tuple(
            TokenEvent(request_id="r", token_ids=(), num_candidates=candidates, num_accepted=accepted)
            for candidates, accepted in ((0, 0), *blocks)
        ),
    )


def test_acceptance_over_requests_weighs_every_verify_step_alike() -> None:
    outputs = [output((3, 3), (3, 0), (1, 1)), output((2, 1)), output()]
    assert acceptance_length(outputs) == (4 + 1 + 2 + 2) / 4
    assert acceptance_length(outputs[2:]) is None and outputs[2].acceptance_length is None
    assert outputs[0].acceptance_length == 7 / 3
    assert accepted_fractions(outputs) == (3 / 4, 1 / 3, 1 / 2)


def test_the_harness_counts_every_step_with_a_token_and_weighs_requests_alike() -> None:
    """The token of the prefill is a step of 1; of the last step counts what a stop left; a step without a token no."""
    lengths = [(1, 4, 2), (1, 1, 1, 3), (1, 0), (0,)]
    outputs = [
        replace(output(), steps=tuple(TokenEvent(request_id="r", token_ids=(7,) * length) for length in steps))
        for steps in lengths
    ]
    assert specdec_bench_acceptance_length(outputs) == pytest.approx((7 / 3 + 6 / 4 + 1) / 3)
    assert specdec_bench_acceptance_length(outputs[3:]) is None


def test_the_time_between_tokens_leaves_the_first_one_out() -> None:
    assert output(num_tokens=4).inter_token_latency_s == 1.0
    assert output(num_tokens=2).inter_token_latency_s == 3.0
    assert output(num_tokens=1).inter_token_latency_s is None


def test_the_first_sample_of_a_prompt_holds_the_others() -> None:
    first, second = output(), output(num_tokens=5)
    assert first.samples == (first,) and first.sample_index == 0
    both = replace(first, other_samples=(second,))
    assert both.samples == (both, second)
