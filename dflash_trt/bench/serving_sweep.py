"""How an engine serves many at once: tokens per second by concurrency, in-flight batching against whole batches, and
adaptive draft length against each fixed K. Sides alternate within a round; ratios are medians over rounds.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bench.throughput import LoadReport, Work, run_in_flight, run_whole_batches
from dflash_trt.core.request import SamplingParams
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.prompts import Prompt

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpeed:
    """Median tokens per second of one draft-length policy at one concurrency."""

    policy: str
    output_tok_per_s: float
    acceptance_length: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyReport:
    """`adaptive_to_best_fixed` is the ratio of medians; the others are medians of ratios, of the adaptive engine."""

    concurrency: int
    speeds: tuple[PolicySpeed, ...]
    best_fixed: str
    adaptive_to_best_fixed: float
    in_flight_to_whole_batches: float
    overlapped_to_plain: float


def sweep(
    engine_dir: Path,
    prompts: Sequence[Prompt],
    *,
    concurrencies: Sequence[int],
    fixed_lengths: Sequence[int],
    num_rounds: int,
    requests_per_client: int,
    max_new_tokens: int,
    progress: Progress,
) -> list[ConcurrencyReport]:
    """One engine per policy, all open together, all given the same work in turn."""
    engines = {f"K = {length}": _open(engine_dir, FixedDraftLength(length)) for length in fixed_lengths}
    with_most = max(fixed_lengths)
    engines["adaptive"] = _open(engine_dir, AdaptiveDraftLength(with_most))
    engines["adaptive, overlapped"] = _open(engine_dir, AdaptiveDraftLength(with_most), overlaps_steps=True)
    try:
        return [
            _at(engines, prompts, concurrency, num_rounds, max(2, requests_per_client), max_new_tokens, progress)
            for concurrency in concurrencies
        ]
    finally:
        for engine in engines.values():
            engine.close()


def _at(
    engines: dict[str, LLM],
    prompts: Sequence[Prompt],
    concurrency: int,
    num_rounds: int,
    requests_per_client: int,
    max_new_tokens: int,
    progress: Progress,
) -> ConcurrencyReport:
    work = _work(prompts, concurrency * requests_per_client, max_new_tokens)
    runs: dict[str, list[LoadReport]] = {name: [] for name in engines}
    whole: list[float] = []
    for round_index in range(num_rounds + 1):
        for name, engine in engines.items():
            runs[name].append(run_in_flight(engine, work, concurrency=concurrency))
        whole.append(run_whole_batches(engines["adaptive"], work, concurrency=concurrency).output_tok_per_s)
        progress(
            f"concurrency {concurrency}, round {round_index}: "
            + ", ".join(f"{name} {reports[-1].output_tok_per_s:.0f}" for name, reports in runs.items())
            + f", whole batches {whole[-1]:.0f} tok/s"
        )
    speeds = tuple(
        PolicySpeed(
            policy=name,
            output_tok_per_s=statistics.median(report.output_tok_per_s for report in reports[1:]),
            acceptance_length=reports[-1].acceptance_length,
        )
        for name, reports in runs.items()
    )
    adaptive = next(speed for speed in speeds if speed.policy == "adaptive")
    fixed = [speed for speed in speeds if not speed.policy.startswith("adaptive")]
    best = max(fixed, key=lambda speed: speed.output_tok_per_s)
    return ConcurrencyReport(
        concurrency=concurrency,
        speeds=speeds,
        best_fixed=best.policy,
        adaptive_to_best_fixed=adaptive.output_tok_per_s / best.output_tok_per_s,
        in_flight_to_whole_batches=statistics.median(
            report.output_tok_per_s / speed for report, speed in zip(runs["adaptive"][1:], whole[1:], strict=True)
        ),
        overlapped_to_plain=statistics.median(
            overlapped.output_tok_per_s / plain.output_tok_per_s
            for overlapped, plain in zip(runs["adaptive, overlapped"][1:], runs["adaptive"][1:], strict=True)
        ),
    )


def _work(prompts: Sequence[Prompt], num_requests: int, max_new_tokens: int) -> list[Work]:
    """Prompts in turn, with many short and few long answers, as requests differ in practice: a third of
    `max_new_tokens` on average.
    """
    lengths = random.Random(0)
    return [
        Work(
            prompt=prompts[i % len(prompts)],
            sampling=SamplingParams(
                max_new_tokens=1 + int((max_new_tokens - 1) * lengths.random() ** 2), ignore_eos=True
            ),
        )
        for i in range(num_requests)
    ]


def _open(engine_dir: Path, policy: DraftLengthPolicy, *, overlaps_steps: bool = False) -> LLM:
    """Prefix reuse is off: a second round must not be cheaper than the first."""
    return LLM(engine_dir, draft_length=policy, reuses_prefixes=False, overlaps_steps=overlaps_steps)
