"""An executor without a device: a simulated clock advances by the time that a plan says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import CHAINED, ExecutorLimits, KnownStep, StepPlan, StepResult, StepRows
from dflash_trt.plan.computed_rows import ComputedRows
from dflash_trt.plan.step_costs import StepClock, StepTime
from dflash_trt.plan.step_floor import floor_of
from dflash_trt.plan.step_work import EngineWork, StepWork
from dflash_trt.simulation.acceptance import AcceptanceByPosition


class SimulatedTime:
    """Simulated seconds, advanced by calls."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """As a clock of an engine loop."""
        return self.now_s

    def reach(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class SimulatedExecutor:
    """Implements StepExecutor with zeros as tokens; `acceptance` accepts drafts, None has no drafter.

    The host's part of a step passes when it is submitted, the device's when its result is read: a chained loop, which
    has the next step in the queue by then, overlaps the two.
    """

    has_queue = True
    can_retry = False

    def __init__(
        self,
        limits: ExecutorLimits,
        work: EngineWork,
        clock: StepClock,
        time: SimulatedTime,
        *,
        acceptance: AcceptanceByPosition | None,
        pads_ranks: bool = False,
    ) -> None:
        self.limits = limits
        self.num_steps = 0
        self.device_s = 0.0
        self.floor_s = 0.0
        self.known_s: defaultdict[str, float] = defaultdict(float)  # of `device_s`, by where it comes from
        self._work, self._clock, self._time = work, clock, time
        self._acceptance, self._pads_ranks = acceptance, pads_ranks
        self._dice = np.random.default_rng(0)
        self._context_lens: list[Array] = []  # by slot, of each rank with requests of its own
        self._free_s = 0.0  # when the device has done what it was given

    def submit(self, plan: StepPlan) -> KnownStep:
        """All ranks take as long as the slowest."""
        plans = (plan, *plan.others)
        while len(self._context_lens) < len(plans):
            self._context_lens.append(np.zeros(self.limits.max_batch_size, np.int64))
        starts = [self._starts(each.rows, known) for each, known in zip(plans, self._context_lens, strict=True)]
        took, work = max(self._works(plans, starts), key=lambda timed: timed[0].device_s)
        ends_s = self._enqueue(took)
        self.num_steps += 1
        self.device_s += took.device_s
        for source, seconds in took.known_s.items():
            self.known_s[source] += seconds
        self.floor_s += floor_of(work, self._clock.gpu).total_s
        first, *others = (self._result(*parts) for parts in zip(plans, starts, self._context_lens, strict=True))
        result = replace(first, others=tuple(others))
        return KnownStep(result, lambda: self._time.reach(ends_s), elapsed_s=took.device_s)

    def _starts(self, rows: StepRows, context_lens: Array) -> Array:
        starts: Array = np.where(rows.context_lens == CHAINED, context_lens[rows.slot_ids], rows.context_lens)
        return starts

    def _works(self, plans: Sequence[StepPlan], starts: Sequence[Array]) -> Iterator[tuple[StepTime, StepWork]]:
        """Of each rank that has rows."""
        joint = plans[0].joint
        shared_tokens = None if joint is None or self._pads_ranks else sum(joint.num_tokens)
        for rows, context_lens in zip((plan.rows for plan in plans), starts, strict=True):
            if rows.num_requests:
                computed = ComputedRows(
                    num_tokens=rows.num_tokens, context_lens=context_lens, num_draft_tokens=rows.num_draft_tokens
                )
                work = self._work.of(computed, shared_tokens=shared_tokens)
                yield self._clock.time(work), work

    def _enqueue(self, took: StepTime) -> float:
        self._time.now_s += took.host_s
        self._free_s = max(self._free_s, self._time.now_s) + took.device_s
        return self._free_s

    def _result(self, plan: StepPlan, starts: Array, context_lens: Array) -> StepResult:
        rows, width = plan.rows, plan.rows.num_draft_tokens + 1
        num_accepted = np.zeros(rows.num_requests, np.int64)
        if self._acceptance is not None:
            num_accepted = self._acceptance.draw(self._dice, rows.num_candidates)
        next_lens = starts + rows.num_tokens - rows.num_candidates + num_accepted
        context_lens[rows.slot_ids] = next_lens
        return StepResult(
            emitted_tokens=np.zeros((rows.num_requests, width), np.int32),
            emitted_logprobs=np.zeros((rows.num_requests, width), np.float32),
            num_accepted=num_accepted.astype(np.int32),
            next_context_lens=next_lens.astype(np.int32),
            draft_tokens=np.zeros((rows.num_requests, width - 1), np.int32),
        )
