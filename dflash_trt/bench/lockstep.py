"""Draft-length policies, or ways of batching, against each other on a machine that is never equally fast for long.

Each side is an engine loop of its own over a share of one executor's pages. The side that has used the least time so
far steps next, so all of them live through the same good and bad moments; a side's time is that of its own steps.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.bench.request_load import counted_clients
from dflash_trt.bench.throughput import Work, mixed_work
from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.batch import ScheduledRequest, SlotMirror, WindowColumns, plan_of, request_results
from dflash_trt.core.request import GenerationOutput, Request
from dflash_trt.core.runtime_config import RuntimeConfig
from dflash_trt.core.step_plan import ExecutorLimits, FinishedStep, StepExecutor, StepPlan, StepResult
from dflash_trt.engine_dir import EngineDir
from dflash_trt.executor.opening import checked_draft_length, max_draft_len, open_executor
from dflash_trt.scheduler.adaptive_draft_length import AdaptiveDraftLength
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.llm import open_codec
from dflash_trt.serving.prompts import Prompt, PromptReader
from dflash_trt.serving.stream import RequestStream

_ADAPTIVE = "adaptive"
_FIXED_LENGTHS = (0, 2, 3, 4)  # and the engine's maximum


@dataclass(frozen=True, kw_only=True, slots=True)
class LockstepReport:
    """One run of one side. `elapsed_s` is the time of its own steps; `acceptance_length` counts the bonus."""

    num_output_tokens: int
    elapsed_s: float
    acceptance_length: float | None

    @property
    def output_tok_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s


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
    """`adaptive_to_best_fixed` is the median of the runs' ratios, to the fixed K that is best by its median."""

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
    progress: Callable[[str], None],
) -> list[PolicyReport]:
    """The adaptive policy against fixed K, at each concurrency; one more round than `num_rounds` warms up.

    `fixed_lengths` default to 0, 2, 3, 4 and the engine's maximum. Of `config`, device, threads and K/V memory count.

    Raises:
        SettingError: the engine cannot draft that many.
    """
    engine = EngineDir.open(engine_dir)
    most = max_draft_len(engine)
    lengths = fixed_lengths or sorted({length for length in _FIXED_LENGTHS if length < most} | {most})
    fixed = {f"K = {length}": checked_draft_length(length, most, name="fixed_lengths") for length in lengths}
    draft_lens = (*fixed.values(), *AdaptiveDraftLength(most).lengths)
    with closing(open_executor(engine, config, draft_lens=draft_lens)) as executor:
        reader = prompt_reader(engine)
        reports = []
        for concurrency in concurrencies:
            policies: dict[str, DraftLengthPolicy] = {name: FixedDraftLength(length) for name, length in fixed.items()}
            policies[_ADAPTIVE] = AdaptiveDraftLength(most)
            work = mixed_work(prompts, concurrency * requests_per_client, max_new_tokens)
            with closing(Lockstep(executor, policies, reader)) as sides:
                runs = []
                for index in range(num_rounds + 1):
                    runs.append(sides.run(work, concurrency=concurrency))
                    speeds = ", ".join(f"{name} {run.output_tok_per_s:.0f}" for name, run in runs[-1].items())
                    progress(f"{counted_clients(concurrency)}, round {index}: {speeds} tok/s")
            reports.append(_report(concurrency, runs[1:], fixed))
    return reports


def prompt_reader(engine: EngineDir) -> PromptReader:
    """With the engine's tokenizer, where it has one."""
    return PromptReader(open_codec(engine), vocab_size=engine.manifest.target.vocab_size)


def best_lengths(reports: Sequence[PolicyReport]) -> dict[int, int]:
    """`draft_length` of a runtime: the best fixed K of the smallest load from 1 request on, of each larger from there.

    A load whose best K is that of the smaller one before needs no entry.
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


class Lockstep:
    """Keeps its sides, and what their policies have learned, from one run to the next."""

    def __init__(
        self,
        executor: StepExecutor,
        policies: Mapping[str, DraftLengthPolicy],
        reader: PromptReader,
        *,
        with_static_batching: Collection[str] = (),
    ) -> None:
        """Prefix caching is off: a second run must not be cheaper than the first.

        A side of `with_static_batching` begins its next requests when the last of the ones before has ended.
        """
        config = SchedulerConfig(enable_prefix_caching=False)
        self._sides = {}
        for index, (name, policy) in enumerate(policies.items()):
            share = _Share(executor, index=index, num_shares=len(policies))
            loop = EngineLoop(share, Scheduler(share.limits, config, policy))
            self._sides[name] = _Side(loop, is_in_flight=name not in with_static_batching)
        self._reader = reader

    def run(self, work: Sequence[Work], *, concurrency: int) -> dict[str, LockstepReport]:
        """All the work on every side, `concurrency` requests at a time: one that ends makes room for the next."""
        requests = [
            Request(
                request_id=str(index),
                prompt_token_ids=self._reader.read(item.prompt),
                sampling=item.sampling,
                stop_token_ids=frozenset(item.sampling.stop_token_ids),
            )
            for index, item in enumerate(work)
        ]
        sides = list(self._sides.values())
        for side in sides:
            side.begin(requests, concurrency)
        while busy := [side for side in sides if side.is_busy]:
            min(busy, key=lambda side: side.elapsed_s).advance()
        return {name: side.report() for name, side in self._sides.items()}

    def close(self) -> None:
        for side in self._sides.values():
            side.close()


class _Side:
    """An engine loop without a thread, and a closed load for it."""

    def __init__(self, loop: EngineLoop, *, is_in_flight: bool) -> None:
        self._loop = loop
        self._is_in_flight = is_in_flight
        self.begin((), 1)

    def begin(self, requests: Sequence[Request], concurrency: int) -> None:
        self._waiting = deque(requests)
        self._concurrency = concurrency
        self._streams: dict[str, RequestStream] = {}  # a stream that is forgotten cancels its request
        self._outputs: list[GenerationOutput] = []
        self.elapsed_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._streams)

    def advance(self) -> None:
        """Fill up, and step once."""
        started_s = time.perf_counter()
        may_fill = self._is_in_flight or not self._streams
        while may_fill and self._waiting and len(self._streams) < self._concurrency:
            stream = self._loop.submit(self._waiting.popleft())
            self._streams[stream.request_id] = stream
            stream.call_when_done(self._finish)
        self._loop.step()
        self.elapsed_s += time.perf_counter() - started_s

    def report(self) -> LockstepReport:
        failed = [output.error for output in self._outputs if output.error is not None]
        assert not failed, failed
        return LockstepReport(
            num_output_tokens=sum(len(output.token_ids) for output in self._outputs),
            elapsed_s=self.elapsed_s,
            acceptance_length=acceptance_length(self._outputs),
        )

    def close(self) -> None:
        self._loop.close()

    def _finish(self, output: GenerationOutput) -> None:
        self._outputs.append(output)
        del self._streams[output.request_id]


class _Share:
    """Some of an executor's pages, as an executor. Its slots are on the host: the executor's are everybody's."""

    has_queue = False

    def __init__(self, executor: StepExecutor, *, index: int, num_shares: int) -> None:
        whole = executor.limits
        groups = tuple(replace(group, num_pages=group.num_pages // num_shares) for group in whole.page_windows)
        self.limits: ExecutorLimits = replace(whole, num_pages=whole.num_pages // num_shares, page_windows=groups)
        self._executor = executor
        self._index = index
        windows = [group.window for group in groups]
        self._slots = SlotMirror(self.limits.max_positions, windows=windows, max_pages=self.limits.max_pages)

    @property
    def can_retry(self) -> bool:
        return self._executor.can_retry

    def submit(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(lambda: self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        batch = self._slots.assemble(plan, page_size=self.limits.page_size)
        requests = tuple(map(self._in_share, batch.requests))
        plan_of_share = plan_of(replace(batch, requests=requests), max_pages=self.limits.max_pages)
        result = self._executor.submit(plan_of_share).result()
        self._slots.store(plan, request_results(result))
        return result

    def _in_share(self, request: ScheduledRequest) -> ScheduledRequest:
        """The request on the pages of the whole."""

        def moved(page_ids: tuple[int, ...], num_pages: int) -> tuple[int, ...]:
            return tuple(self._index * num_pages + page_id for page_id in page_ids)

        groups = zip(request.window_pages, self.limits.page_windows, strict=True)
        return replace(
            request,
            page_ids=moved(request.page_ids, self.limits.num_pages),
            window_pages=tuple(
                WindowColumns(pages.first, moved(pages.page_ids, group.num_pages)) for pages, group in groups
            ),
        )
