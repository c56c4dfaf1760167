"""Draft length policies compared on a machine whose speed drifts.

Each side is an engine loop of its own over a share of one executor's pages. The side that has used the least time so
far steps next, so all of them live through the same good and bad moments; a side's time is the time of its own steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dflash_trt.core.acceptance import acceptance_length
from dflash_trt.core.batch import ScheduledRequest, SlotMirror, WindowColumns, plan_of, request_results
from dflash_trt.core.request import GenerationOutput, Request, SamplingParams
from dflash_trt.core.step_plan import ExecutorLimits, FinishedStep, StepExecutor, StepPlan, StepResult
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.data_parallel import make_scheduler
from dflash_trt.scheduler.draft_length import DraftLengthPolicy
from dflash_trt.serving.engine_loop import EngineLoop
from dflash_trt.serving.prompts import Prompt, PromptReader
from dflash_trt.serving.stream import RequestStream


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One request to be sent."""

    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class LockstepReport:
    """One run of one side. `elapsed_s` is the time of its own steps; `acceptance_length` counts the bonus."""

    num_output_tokens: int
    elapsed_s: float
    acceptance_length: float | None

    @property
    def output_tok_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s


class Lockstep:
    """Keeps its sides, and what their policies have learned, from one run to the next."""

    def __init__(
        self,
        executor: StepExecutor,
        policies: Mapping[str, DraftLengthPolicy],
        reader: PromptReader,
        *,
        num_ranks: int = 1,
        ngram: bool = False,
    ) -> None:
        """Prefix caching is off: a second run must not be cheaper than the first.

        `num_ranks` of the executor have requests of their own.
        """
        config = SchedulerConfig(enable_prefix_caching=False, ngram=ngram)
        self._sides = {}
        for index, (name, policy) in enumerate(policies.items()):
            share = _Share(executor, index=index, num_shares=len(policies), num_ranks=num_ranks)
            loop = EngineLoop(share, make_scheduler(share.limits, config, policy, num_ranks=num_ranks))
            self._sides[name] = _Side(loop)
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

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
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
        while self._waiting and len(self._streams) < self._concurrency:
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
    """A share of an executor's pages, as an executor.

    Its slots are on the host: all sides share the executor's.
    """

    has_queue = False

    def __init__(self, executor: StepExecutor, *, index: int, num_shares: int, num_ranks: int) -> None:
        whole = executor.limits
        groups = tuple(replace(group, num_pages=group.num_pages // num_shares) for group in whole.page_windows)
        self.limits: ExecutorLimits = replace(whole, num_pages=whole.num_pages // num_shares, page_windows=groups)
        self._executor = executor
        self._index = index
        windows = [group.window for group in groups]
        self._slots = [
            SlotMirror(self.limits.max_positions, windows=windows, max_pages=self.limits.max_pages)
            for _ in range(num_ranks)
        ]

    @property
    def can_retry(self) -> bool:
        return self._executor.can_retry

    def submit(self, plan: StepPlan) -> FinishedStep:
        return FinishedStep(lambda: self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        plans = (plan, *plan.others)
        first, *others = map(self._plan_in_share, self._slots, plans)
        result = self._executor.submit(replace(first, others=tuple(others))).result()
        for slots, of_rank, own in zip(self._slots, plans, (result, *result.others), strict=True):
            slots.store(of_rank, request_results(own))
        return result

    def _plan_in_share(self, slots: SlotMirror, plan: StepPlan) -> StepPlan:
        batch = slots.assemble(plan, page_size=self.limits.page_size)
        requests = tuple(map(self._in_share, batch.requests))
        made = plan_of(replace(batch, requests=requests), max_pages=self.limits.max_pages)
        return replace(made, joint=plan.joint)

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
