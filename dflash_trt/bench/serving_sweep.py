"""How an engine serves many at once: tokens per second by concurrency, in-flight batching against static batching, and
the overlapped loop against the plain one.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bench.lockstep import Lockstep, prompt_reader
from dflash_trt.bench.request_load import counted_clients
from dflash_trt.bench.throughput import LoadReport, Work, mixed_work, run_in_flight
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import max_draft_len, open_executor
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.serving.llm import LLM
from dflash_trt.serving.prompts import Prompt

Progress = Callable[[str], None]

_IN_FLIGHT, _WHOLE = "in flight", "static batching"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyReport:
    """Medians over rounds. Speed and time to first token are those of the plain loop; the ratios are of speeds."""

    concurrency: int
    output_tok_per_s: float
    mean_time_to_first_token_s: float
    acceptance_length: float | None
    in_flight_to_static_batching: float
    in_flight_to_static_batching_by_round: tuple[float, ...]
    overlapped_to_plain: float


def sweep(
    engine_dir: Path,
    prompts: Sequence[Prompt],
    *,
    config: RuntimeConfig,
    concurrencies: Sequence[int],
    num_rounds: int,
    requests_per_client: int,
    max_new_tokens: int,
    progress: Progress,
) -> list[ConcurrencyReport]:
    """One more round than `num_rounds` warms up. All sides draft adaptively and keep what they learn.

    Of `config`, device, threads and K/V memory count.
    """
    reports = []
    for concurrency in concurrencies:
        work = mixed_work(prompts, concurrency * requests_per_client, max_new_tokens)
        ratios = _batching(engine_dir, config, work, concurrency, num_rounds, progress)
        plain, overlapped = _loops(engine_dir, config, work, concurrency, num_rounds, progress)
        speeds = [(a.output_tok_per_s, b.output_tok_per_s) for a, b in zip(plain, overlapped, strict=True)]
        reports.append(
            ConcurrencyReport(
                concurrency=concurrency,
                output_tok_per_s=statistics.median(speed for speed, _ in speeds),
                mean_time_to_first_token_s=statistics.median(run.mean_time_to_first_token_s for run in plain),
                acceptance_length=plain[-1].acceptance_length,
                in_flight_to_static_batching=statistics.median(ratios),
                in_flight_to_static_batching_by_round=ratios,
                overlapped_to_plain=statistics.median(b / a for a, b in speeds),
            )
        )
    return reports


def _batching(
    engine_dir: Path, config: RuntimeConfig, work: Sequence[Work], concurrency: int, num_rounds: int, progress: Progress
) -> tuple[float, ...]:
    """In-flight over static batching by round, in lockstep over one executor."""
    engine = EngineDir.open(engine_dir)
    ratios = []
    with ExitStack() as stack:
        policies = {name: AdaptiveDraftLength(max_draft_len(engine)) for name in (_IN_FLIGHT, _WHOLE)}
        draft_lens = policies[_WHOLE].lengths
        executor = stack.enter_context(closing(open_executor(engine, config, draft_lens=draft_lens)))
        sides = stack.enter_context(
            closing(Lockstep(executor, policies, prompt_reader(engine), with_static_batching={_WHOLE}))
        )
        for index in range(num_rounds + 1):
            run = sides.run(work, concurrency=concurrency)
            speeds = {name: run[name].output_tok_per_s for name in policies}
            progress(_line(concurrency, index, speeds))
            ratios.append(speeds[_IN_FLIGHT] / speeds[_WHOLE])
    return tuple(ratios[1:])


def _loops(
    engine_dir: Path, config: RuntimeConfig, work: Sequence[Work], concurrency: int, num_rounds: int, progress: Progress
) -> tuple[list[LoadReport], list[LoadReport]]:
    """The plain and the overlapped loop, each opened for its turn alone: idle threads of the other would disturb it.

    Prefix caching is off: a second round must not be cheaper than the first.
    """
    max_length = max_draft_len(EngineDir.open(engine_dir))
    policies = {overlaps: AdaptiveDraftLength(max_length) for overlaps in (False, True)}
    runs: dict[bool, list[LoadReport]] = {False: [], True: []}
    for index in range(num_rounds + 1):
        for overlaps, policy in policies.items():
            settings = config.replaced(enable_prefix_caching=False, overlap_scheduling=overlaps)
            with LLM(engine_dir, settings, draft_length_policy=policy) as engine:
                runs[overlaps].append(run_in_flight(engine, work, concurrency=concurrency))
        speeds = {"plain loop": runs[False][-1].output_tok_per_s, "overlapped loop": runs[True][-1].output_tok_per_s}
        progress(_line(concurrency, index, speeds))
    return runs[False][1:], runs[True][1:]


def _line(concurrency: int, index: int, speeds: dict[str, float]) -> str:
    return (
        f"{counted_clients(concurrency)}, round {index}: "
        + ", ".join(f"{n} {speed:.0f}" for n, speed in speeds.items())
        + " tok/s"
    )
