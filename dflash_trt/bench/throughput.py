"""Throughput by the number of clients and by K: fixed draft lengths and the adaptive policy, in lockstep."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bench.lockstep import Lockstep, LockstepReport, Work
from dflash_trt.bench.progress import Progress
from dflash_trt.bench.request_load import counted_clients
from dflash_trt.core.request import SamplingParams
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import check_draft_length, max_draft_len, open_executor
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength
from dflash_trt.serving.llm import open_codec
from dflash_trt.serving.prompts import Prompt, PromptReader

_ADAPTIVE = "adaptive"
_FIXED_LENGTHS = (0, 2, 3, 4)  # and the engine's maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpeed:
    """One policy at one concurrency, the median over runs; `acceptance_length` is the last run's.

    `num_draft_tokens` is None of the adaptive policy.
    """

    policy: str
    num_draft_tokens: int | None
    output_tok_per_s: float
    acceptance_length: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """`adaptive_to_best_fixed` is the median of the runs' ratios to the fixed K with the best median."""

    concurrency: int
    speeds: tuple[PolicySpeed, ...]
    best_fixed: str
    best_fixed_length: int
    adaptive_to_best_fixed: float
    adaptive_to_best_fixed_by_round: tuple[float, ...]


def compare_policies(
    engine_dir: Path,
    prompts: Sequence[Prompt],
    *,
    concurrencies: Sequence[int],
    fixed_lengths: Sequence[int],
    num_rounds: int,
    requests_per_client: int,
    max_new_tokens: int,
    config: RuntimeConfig,
    progress: Progress,
) -> list[PolicyReport]:
    """Compare the adaptive policy with fixed K at each concurrency; one round in addition warms up.

    `fixed_lengths` default to 0, 2, 3, 4 and the engine's maximum. `config` sets device, threads, K/V memory and
    drafts from texts only.

    Raises:
        SettingError: the engine cannot draft that many.
    """
    engine = EngineDir.open(engine_dir)
    num_ranks = engine.manifest.pretrained_config.mapping.dp_size
    most = max_draft_len(engine)
    lengths = fixed_lengths or sorted({length for length in _FIXED_LENGTHS if length < most} | {most})
    for length in lengths:
        check_draft_length(length, engine, name="fixed_lengths")
    fixed = {f"K = {length}": length for length in lengths}
    draft_lens = (*fixed.values(), *AdaptiveDraftLength(most).lengths)
    config = config.replaced(adaptive_draft_length=True)  # so that drafts have a confidence
    with closing(open_executor(engine, config, draft_lens=draft_lens)) as executor:
        reader = prompt_reader(engine)
        reports = []
        num_runs = len(concurrencies) * (num_rounds + 1)
        for load_index, concurrency in enumerate(concurrencies):
            policies: dict[str, DraftLengthPolicy] = {name: FixedDraftLength(length) for name, length in fixed.items()}
            policies[_ADAPTIVE] = AdaptiveDraftLength(most, device="cuda" if executor.has_queue else "cpu")
            work = mixed_work(prompts, concurrency * requests_per_client, max_new_tokens)
            with closing(Lockstep(executor, policies, reader, num_ranks=num_ranks, ngram=config.ngram)) as sides:
                runs = []
                for index in range(num_rounds + 1):
                    runs.append(sides.run(work, concurrency=concurrency))
                    speeds = ", ".join(f"{name} {run.output_tok_per_s:.0f}" for name, run in runs[-1].items())
                    number = load_index * (num_rounds + 1) + index + 1
                    progress(number, num_runs, f"{counted_clients(concurrency)}, round {index}: {speeds} tok/s")
            reports.append(_report(concurrency, runs[1:], fixed))
    return reports


def mixed_work(prompts: Sequence[Prompt], num_requests: int, max_new_tokens: int) -> list[Work]:
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


def prompt_reader(engine: EngineDir) -> PromptReader:
    """With the engine's tokenizer, where it has one."""
    return PromptReader(open_codec(engine), vocab_size=engine.manifest.target.vocab_size)


def best_lengths(reports: Sequence[PolicyReport]) -> dict[int, int]:
    """`draft_length` for a runtime: the best fixed K by load; the smallest load counts from 1 request.

    A load with the same best K as the next smaller one needs no entry.
    """
    table: dict[int, int] = {}
    for report in sorted(reports, key=lambda report: report.concurrency):
        if not table or report.best_fixed_length != list(table.values())[-1]:
            table[report.concurrency if table else 1] = report.best_fixed_length
    return table


def _report(concurrency: int, runs: Sequence[Mapping[str, LockstepReport]], fixed: Mapping[str, int]) -> PolicyReport:
    speeds = {name: statistics.median(run[name].output_tok_per_s for run in runs) for name in runs[0]}
    best = max((name for name in speeds if name != _ADAPTIVE), key=lambda name: speeds[name])
    ratios = tuple(run[_ADAPTIVE].output_tok_per_s / run[best].output_tok_per_s for run in runs)
    return PolicyReport(
        concurrency=concurrency,
        speeds=tuple(
            PolicySpeed(
                policy=name,
                num_draft_tokens=fixed.get(name),
                output_tok_per_s=speed,
                acceptance_length=runs[-1][name].acceptance_length,
            )
            for name, speed in speeds.items()
        ),
        best_fixed=best,
        best_fixed_length=fixed[best],
        adaptive_to_best_fixed=statistics.median(ratios),
        adaptive_to_best_fixed_by_round=ratios,
    )
