"""How an engine serves many at once: tokens per second by concurrency, in-flight batching against whole batches, and
the overlapped loop against the plain one. Sides take turns within a round; ratios are medians over rounds.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bench.throughput import Work, mixed_work, run_in_flight, run_whole_batches
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.prompts import Prompt

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyReport:
    """Medians over rounds, of in-flight batching in the plain loop. Its ratios are of tokens per second."""

    concurrency: int
    output_tok_per_s: float
    mean_time_to_first_token_s: float
    acceptance_length: float | None
    in_flight_to_whole_batches: float
    overlapped_to_plain: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """Tokens per second of each side."""

    in_flight: float
    whole_batches: float
    overlapped: float
    mean_time_to_first_token_s: float
    acceptance_length: float | None


def sweep(
    engine_dir: Path,
    prompts: Sequence[Prompt],
    *,
    concurrencies: Sequence[int],
    num_rounds: int,
    requests_per_client: int,
    max_new_tokens: int,
    progress: Progress,
) -> list[ConcurrencyReport]:
    """One more round than `num_rounds` warms up. What the draft-length policies learn stays from round to round."""
    reports = []
    for concurrency in concurrencies:
        work = mixed_work(prompts, concurrency * max(2, requests_per_client), max_new_tokens)
        sides = _Sides(engine_dir)
        rounds = []
        for index in range(num_rounds + 1):
            rounds.append(sides.run(work, concurrency))
            progress(
                f"{concurrency} clients, round {index}: in flight {rounds[-1].in_flight:.0f}, "
                f"whole batches {rounds[-1].whole_batches:.0f}, overlapped {rounds[-1].overlapped:.0f} tok/s"
            )
        reports.append(_report(concurrency, rounds[1:]))
    return reports


class _Sides:
    """Each is opened for its turn alone, so that none has idle threads of another beside it."""

    def __init__(self, engine_dir: Path) -> None:
        self._engine_dir = engine_dir
        with LLM(engine_dir) as engine:
            most = engine.limits.max_draft_len
        self._plain, self._overlapped = AdaptiveDraftLength(most), AdaptiveDraftLength(most)

    def run(self, work: Sequence[Work], concurrency: int) -> _Round:
        with self._open(self._plain) as engine:
            in_flight = run_in_flight(engine, work, concurrency=concurrency)
            whole = run_whole_batches(engine, work, concurrency=concurrency)
        with self._open(self._overlapped, overlaps_steps=True) as engine:
            overlapped = run_in_flight(engine, work, concurrency=concurrency)
        return _Round(
            in_flight=in_flight.output_tok_per_s,
            whole_batches=whole.output_tok_per_s,
            overlapped=overlapped.output_tok_per_s,
            mean_time_to_first_token_s=in_flight.mean_time_to_first_token_s,
            acceptance_length=in_flight.acceptance_length,
        )

    def _open(self, policy: AdaptiveDraftLength, *, overlaps_steps: bool = False) -> LLM:
        """Prefix reuse is off: a second round must not be cheaper than the first."""
        return LLM(self._engine_dir, draft_length=policy, reuses_prefixes=False, overlaps_steps=overlaps_steps)


def _report(concurrency: int, rounds: Sequence[_Round]) -> ConcurrencyReport:
    return ConcurrencyReport(
        concurrency=concurrency,
        output_tok_per_s=statistics.median(each.in_flight for each in rounds),
        mean_time_to_first_token_s=statistics.median(each.mean_time_to_first_token_s for each in rounds),
        acceptance_length=rounds[-1].acceptance_length,
        in_flight_to_whole_batches=statistics.median(each.in_flight / each.whole_batches for each in rounds),
        overlapped_to_plain=statistics.median(each.overlapped / each.in_flight for each in rounds),
    )
