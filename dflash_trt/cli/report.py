"""The summary at the end of `dflash-trt run`: speed, time to first token, acceptance.

Arithmetic and text only.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.core.acceptance import acceptance_length, accepted_fractions
from dflash_trt.core.request import GenerationOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Spread of a measured time, in seconds."""

    mean: float
    median: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """`wall_time_s` runs from the first request to the last token; loading the engine is `load_time_s`.

    `acceptance_length` is the mean of tokens emitted per verify step, bonus included.
    `num_ended_at_max_seq_len` counts texts that the engine's limit ended before their own.
    `accepted_fraction_by_position[i]` is how often draft i (from 0) was accepted, of the steps that verified it.
    """

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_ended_at_max_seq_len: int
    load_time_s: float
    wall_time_s: float
    output_tok_per_s: float
    time_to_first_token_s: Spread | None
    uses_drafter: bool
    max_draft_tokens: int  # per request and step
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_ngram_draft_tokens: int  # of num_draft_tokens, from the requests' own texts
    num_ngram_accepted_tokens: int
    acceptance_length: float | None
    acceptance_length_includes_bonus: bool
    accepted_fraction_by_position: tuple[float, ...]


def summarize(
    outputs: Sequence[GenerationOutput],
    *,
    max_new_tokens: Sequence[int],
    num_refused: int,
    load_time_s: float,
    wall_time_s: float,
    max_draft_tokens: int,
) -> RunSummary:
    """Sum up finished requests with their `max_new_tokens`; `num_refused` more never reached the engine."""
    num_failed = num_refused + sum(output.finish_reason == "error" for output in outputs)
    num_output_tokens = sum(len(output.token_ids) for output in outputs)
    ngram_steps = [step for output in outputs for step in output.steps if step.ngram_draft_token_ids]
    first_token_times = [output.time_to_first_token_s for output in outputs if output.token_ids]
    return RunSummary(
        num_requests=len(outputs) + num_refused,
        num_failed=num_failed,
        num_prompt_tokens=sum(output.num_prompt_tokens for output in outputs),
        num_output_tokens=num_output_tokens,
        num_ended_at_max_seq_len=sum(
            output.finish_reason == "length" and len(output.token_ids) < limit
            for output, limit in zip(outputs, max_new_tokens, strict=True)
        ),
        load_time_s=load_time_s,
        wall_time_s=wall_time_s,
        output_tok_per_s=num_output_tokens / wall_time_s if wall_time_s > 0 else 0.0,
        time_to_first_token_s=_spread(first_token_times),
        uses_drafter=max_draft_tokens > 0,
        max_draft_tokens=max_draft_tokens,
        num_verify_steps=sum(output.num_verify_steps for output in outputs),
        num_draft_tokens=sum(output.num_draft_tokens for output in outputs),
        num_accepted_tokens=sum(output.num_accepted_tokens for output in outputs),
        num_ngram_draft_tokens=sum(step.num_candidates for step in ngram_steps),
        num_ngram_accepted_tokens=sum(step.num_accepted for step in ngram_steps),
        acceptance_length=acceptance_length(outputs),
        acceptance_length_includes_bonus=True,
        accepted_fraction_by_position=accepted_fractions(outputs),
    )


def summary_lines(summary: RunSummary) -> list[str]:
    """The summary for a person."""
    requests = f"{summary.num_requests} request{'s' if summary.num_requests != 1 else ''}"
    failed = f" ({summary.num_failed} failed)" if summary.num_failed else ""
    lines = [
        f"{requests}{failed}: {summary.num_prompt_tokens} prompt and {summary.num_output_tokens} output tokens "
        f"in {summary.wall_time_s:.2f} s, {summary.output_tok_per_s:.1f} tok/s (engine loaded in "
        f"{summary.load_time_s:.2f} s)"
    ]
    if summary.num_ended_at_max_seq_len:
        texts = "1 text" if summary.num_ended_at_max_seq_len == 1 else f"{summary.num_ended_at_max_seq_len} texts"
        lines.append(f"{texts} ended at the engine's max_seq_len, before max_new_tokens")
    times = summary.time_to_first_token_s
    if times is not None:
        lines.append(f"time to first token: median {1000 * times.median:.1f} ms, max {1000 * times.max:.1f} ms")
    if not summary.uses_drafter:
        lines.append("plain autoregressive decoding, without a drafter")
    elif summary.acceptance_length is None:
        lines.append("acceptance length: none, no step verified a draft")
    else:
        rates = "  ".join(
            f"{i}: {fraction:.2f}" for i, fraction in enumerate(summary.accepted_fraction_by_position, start=1)
        )
        lines += [
            f"acceptance length: {summary.acceptance_length:.2f} tokens per verify step, bonus included "
            f"({summary.num_verify_steps} verify steps, K = {summary.max_draft_tokens} at most)",
            f"accepted by draft position: {rates}",
        ]
    if summary.num_ngram_draft_tokens:
        verified, accepted = summary.num_ngram_draft_tokens, summary.num_ngram_accepted_tokens
        lines.append(
            f"accepted by source: {summary.num_accepted_tokens - accepted} of {summary.num_draft_tokens - verified} "
            f"drafts from the drafter, {accepted} of {verified} from texts"
        )
    return lines


def _spread(times_s: Sequence[float]) -> Spread | None:
    if not times_s:
        return None
    return Spread(mean=statistics.fmean(times_s), median=statistics.median(times_s), max=max(times_s))
