from dataclasses import asdict, replace

import pytest

from dflash_trt.cli.report import RunSummary, summarize, summary_lines
from dflash_trt.core.request import FinishReason, GenerationOutput, TokenEvent


def _output(
    *accepted: tuple[int, int], num_tokens: int, first_s: float = 0.5, error: str | None = None
) -> GenerationOutput:
    """`accepted` are (num_candidates, num_accepted) of each step, the first for the prefill."""
    reason: FinishReason = "length" if error is None else "error"
    verified = [(candidates, accepted_) for candidates, accepted_ in accepted if candidates]
    return GenerationOutput(
        request_id="r",
        text="",
        token_ids=tuple(range(num_tokens)),
        logprobs=(),
        finish_reason=reason,
        num_prompt_tokens=5,
        num_verify_steps=len(verified),
        num_draft_tokens=sum(candidates for candidates, _ in verified),
        num_accepted_tokens=sum(accepted_ for _, accepted_ in verified),
        num_emitted_by_verify=sum(accepted_ + 1 for _, accepted_ in verified),
        time_to_first_token_s=first_s,
        total_s=1.0,
        error=error,
        steps=tuple(TokenEvent(request_id="r", token_ids=(), num_candidates=c, num_accepted=a) for c, a in accepted),
    )


def _summary(*outputs: GenerationOutput, num_refused: int = 0, max_draft_tokens: int = 3) -> RunSummary:
    return summarize(
        outputs,
        max_new_tokens=[9] * len(outputs),
        num_refused=num_refused,
        load_time_s=1.0,
        wall_time_s=2.0,
        max_draft_tokens=max_draft_tokens,
    )


def test_rates_by_position_count_only_steps_that_verified_that_position() -> None:
    summary = _summary(_output((0, 0), (3, 3), (3, 1), (1, 1), num_tokens=9))
    assert summary.accepted_fraction_by_position == (1.0, 0.5, 0.5)
    assert summary.acceptance_length == (4 + 2 + 2) / 3
    assert (summary.num_verify_steps, summary.num_draft_tokens, summary.num_accepted_tokens) == (3, 7, 5)


def test_counts_and_times_are_over_all_requests() -> None:
    failed = _output(num_tokens=0, first_s=0.0, error="bad")
    empty = replace(_output(num_tokens=0, first_s=9.0), finish_reason="cancelled")
    told = [_output(num_tokens=4, first_s=0.2), _output(num_tokens=6, first_s=0.4), failed, empty]
    summary = _summary(*told, num_refused=1)
    assert (summary.num_requests, summary.num_failed) == (5, 2)
    assert (summary.num_output_tokens, summary.output_tok_per_s) == (10, 5.0)
    assert summary.time_to_first_token_s is not None
    assert asdict(summary.time_to_first_token_s) == pytest.approx({"mean": 0.3, "median": 0.3, "max": 0.4})


def test_texts_that_the_engine_ended_early_are_counted() -> None:
    whole, cut, failed = _output(num_tokens=9), _output(num_tokens=8), _output(num_tokens=1, error="bad")
    early = replace(cut, finish_reason="stop")
    line = "1 text ended at the engine's max_seq_len, before max_new_tokens"
    assert line in summary_lines(_summary(whole, cut, failed, early))
    assert "2 texts ended" in "".join(summary_lines(_summary(cut, cut)))
    assert not any("max_seq_len" in text for text in summary_lines(_summary(whole, failed, early)))


def test_drafts_of_texts_are_apart_from_the_drafters() -> None:
    output = _output((0, 0), (3, 3), (3, 1), (1, 1), num_tokens=9)
    assert not any("by source" in line for line in summary_lines(_summary(output)))
    prefill, first, *others = output.steps
    first = first._replace(ngram_draft_token_ids=(7, 8, 9))
    summary = _summary(replace(output, steps=(prefill, first, *others)))
    assert (summary.num_ngram_draft_tokens, summary.num_ngram_accepted_tokens) == (3, 3)
    assert "accepted by source: 2 of 4 drafts from the drafter, 3 of 3 from texts" in summary_lines(summary)


def test_the_words_say_that_the_bonus_is_included() -> None:
    lines = "\n".join(summary_lines(_summary(_output((0, 0), (2, 1), num_tokens=3))))
    assert "acceptance length: 2.00 tokens per verify step, bonus included (1 verify steps, K = 3 at most)" in lines
    assert "accepted by draft position: 1: 1.00  2: 0.00" in lines
    assert "1 request: 5 prompt and 3 output tokens in 2.00 s, 1.5 tok/s" in lines


def test_a_run_without_a_drafter_says_so() -> None:
    lines = summary_lines(_summary(_output((0, 0), num_tokens=3), max_draft_tokens=0))
    assert lines[-1] == "plain autoregressive decoding, without a drafter"


def test_a_run_without_any_token_has_no_times() -> None:
    summary = _summary(num_refused=2)
    assert summary.time_to_first_token_s is None
    assert summary.acceptance_length is None
    assert summary_lines(summary)[0].startswith("2 requests (2 failed): 0 prompt and 0 output tokens")


def test_times_are_over_requests_in_any_order() -> None:
    times = (0.3, 0.9, 0.2)
    found = _summary(*(_output((0, 0), num_tokens=1, first_s=time_s) for time_s in times)).time_to_first_token_s
    assert found is not None
    assert (found.median, found.max, found.mean) == (0.3, 0.9, pytest.approx(1.4 / 3))
