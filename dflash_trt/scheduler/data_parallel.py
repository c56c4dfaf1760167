"""Attention data parallelism: each rank has requests, pages and slots of its own, and all ranks share the experts.

Every rank has a Scheduler. Their steps are planned, run and committed together, as every rank computes some experts for
the rows of all.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from dflash_trt.core.errors import RequestError
from dflash_trt.core.prefix_watcher import PrefixWatcher
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.core.step_plan import ExecutorLimits, JointRows, StepResult
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy, FixedDraftLength, StepObservation
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.request_pool import check_queue
from dflash_trt.scheduler.scheduler import Scheduler, check_fits, max_len_of
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.shared_prefixes import SharedPrefixes
from dflash_trt.scheduler.statistics import SchedulerStatistics, of_all_ranks


class DataParallelScheduler:
    """Has the methods of a Scheduler, over one for each rank. `limits` are those of each rank.

    A request joins the rank where it costs least: its tokens without a cached prefix, and for each request that this
    rank has more than the emptiest one, the tokens that it may emit. While it waits it moves to any rank with room.

    `policy` chooses one K for all ranks, by the requests of the rank that has most: a step takes as long as its slowest
    rank. For the same reason no rank leaves out drafts.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        config: SchedulerConfig | None = None,
        policy: DraftLengthPolicy | None = None,
        *,
        num_ranks: int,
    ) -> None:
        self._limits = limits
        self.config = config or SchedulerConfig()
        self._policy = policy or FixedDraftLength(limits.max_draft_len)
        self._lengths = [
            _RankDraftLength(self._policy, first_slot=rank * limits.max_batch_size) for rank in range(num_ranks)
        ]
        self.ranks = [Scheduler(limits, self.config, length) for length in self._lengths]
        self._planned: deque[tuple[PlannedStep, list[PlannedStep]]] = deque()
        self._num_steps = Counter[int]()  # by K
        self._num_arrivals = 0

    # Arrivals and departures

    def add(self, request: Request, now: float = 0.0) -> None:
        """See Scheduler."""
        if self._rank_with(request.request_id) is not None:
            raise RequestError.about(
                "request id", expected="a new one", found=f"{request.request_id!r}, in use", hint="Choose another."
            )
        check_fits(request, self._limits)
        sequence = Sequence.of(request, now, index=self._num_arrivals, max_len=max_len_of(self._limits))
        num_waiting = sum(rank.num_waiting for rank in self.ranks)
        check_queue(sequence, num_waiting, max_len=self.config.max_queue_len)
        min(self.ranks, key=self._cost_of(sequence)).adopt(sequence, now)
        self._num_arrivals += 1

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> TokenEvent | None:
        rank = self._rank_with(request_id)
        return None if rank is None else rank.end(request_id, reason, error)

    def preempt(self, request_id: str) -> bool:
        rank = self._rank_with(request_id)
        return rank is not None and rank.preempt(request_id)

    def pause(self, request_id: str) -> bool:
        rank = self._rank_with(request_id)
        return rank is not None and rank.pause(request_id)

    def resume(self, request_id: str) -> bool:
        rank = self._rank_with(request_id)
        return rank is not None and rank.resume(request_id)

    def request_ids(self) -> set[str]:
        return set[str]().union(*(rank.request_ids() for rank in self.ranks))

    def expire(self, now: float) -> None:
        for rank in self.ranks:
            rank.expire(now)

    @property
    def limits(self) -> ExecutorLimits:
        """Of all ranks together, but for the tokens of a step."""
        num_ranks, limits = len(self.ranks), self._limits
        return replace(limits, max_batch_size=num_ranks * limits.max_batch_size, num_pages=num_ranks * limits.num_pages)

    @property
    def has_work(self) -> bool:
        return any(rank.has_work for rank in self.ranks)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_paused(self) -> int:
        return sum(rank.num_paused for rank in self.ranks)

    # Steps

    def plan(self, now: float = 0.0) -> PlannedStep:
        """The next step: rank 0's plan, with the others', or one without anything to do."""
        self._move_waiting(now)
        length = self._policy.choose(max(rank.num_decoding for rank in self.ranks))
        for each in self._lengths:
            each.length = length
        steps = [rank.plan(now) for rank in self.ranks]
        joint = _joined(steps)
        self._planned.append((joint, steps))
        return joint

    def settle(self, step: PlannedStep, result: StepResult | None) -> None:
        joint, steps = self._planned.popleft()
        assert joint is step, "steps are committed in the order in which they were planned"
        results = [None] * len(steps) if result is None else [result, *result.others]
        for rank, own_step, own_result in zip(self.ranks, steps, results, strict=True):
            rank.settle(own_step, own_result)
        if result is not None:
            self._num_steps[joint.plan.rows.num_draft_tokens] += 1

    def events(self, *, elapsed_s: float | None = None) -> list[TokenEvent]:
        events = [event for rank in self.ranks for event in rank.events(elapsed_s=elapsed_s)]
        observed = [step for length in self._lengths if (step := length.take_observed()) is not None]
        if observed:
            self._policy.observe(max(observed, key=lambda step: step.num_decoding))
        return events

    def commit(
        self, step: PlannedStep, result: StepResult | None, *, elapsed_s: float | None = None
    ) -> list[TokenEvent]:
        self.settle(step, result)
        return self.events(elapsed_s=elapsed_s)

    def abandon(self) -> None:
        self._planned.pop()
        for rank in self.ranks:
            rank.abandon()

    def lose_device(self, reason: str) -> list[TokenEvent]:
        self._planned.clear()
        return [event for rank in self.ranks for event in rank.lose_device(reason)]

    # Looking on

    def watch_prefixes(self, watcher: PrefixWatcher | None) -> None:
        """Tell `watcher` of blocks that some rank has, once for all ranks."""
        shared = None if watcher is None else SharedPrefixes(watcher)
        for rank in self.ranks:
            rank.watch_prefixes(None if shared is None else shared.of_rank())

    def statistics(self) -> SchedulerStatistics:
        parts, counts = [rank.statistics() for rank in self.ranks], [rank.counts for rank in self.ranks]
        return replace(of_all_ranks(parts, counts, self._num_steps), num_arrivals=self._num_arrivals)

    def check_integrity(self) -> None:
        for rank in self.ranks:
            rank.check_integrity()
        assert len(self.request_ids()) == sum(len(rank.request_ids()) for rank in self.ranks), "a request on two ranks"

    # Inside

    def _rank_with(self, request_id: str) -> Scheduler | None:
        return next((rank for rank in self.ranks if request_id in rank), None)

    def _cost_of(self, sequence: Sequence) -> Callable[[Scheduler], int]:
        """The tokens that running a request on a rank costs."""
        fewest = min(rank.num_running + rank.num_waiting for rank in self.ranks)

        def cost(rank: Scheduler) -> int:
            num_more = rank.num_running + rank.num_waiting - fewest
            return rank.num_missing_tokens(sequence) + num_more * (sequence.max_len - len(sequence.token_ids))

        return cost

    def _move_waiting(self, now: float) -> None:
        """Let requests that wait for room on one rank run on another."""
        for rank in self.ranks:
            while (sequence := rank.next_waiting()) is not None and not rank.has_room_for(sequence):
                others = [other for other in self.ranks if not other.num_waiting and other.has_room_for(sequence)]
                if not others:
                    break
                rank.give_up(sequence)
                min(others, key=self._cost_of(sequence)).adopt(sequence, now)


# Under the engine loop: of one rank's requests, or of several ranks'.
StepScheduler = Scheduler | DataParallelScheduler


def make_scheduler(
    limits: ExecutorLimits,
    config: SchedulerConfig | None = None,
    policy: DraftLengthPolicy | None = None,
    *,
    num_ranks: int,
) -> StepScheduler:
    """The scheduler of an engine of which `num_ranks` ranks have requests of their own (`Mapping.dp_size`)."""
    if num_ranks == 1:
        return Scheduler(limits, config, policy)
    return DataParallelScheduler(limits, config, policy, num_ranks=num_ranks)


class _RankDraftLength(DraftLengthPolicy):
    """K of one rank: the one that was chosen for all."""

    is_joint = True

    def __init__(self, policy: DraftLengthPolicy, *, first_slot: int) -> None:
        self.lengths = policy.lengths
        self.length = 0
        self._first_slot = first_slot
        self._observed: StepObservation | None = None

    def choose(self, num_decoding: int) -> int:
        return self.length

    def observe(self, step: StepObservation) -> None:
        self._observed = replace(step, slots=step.slots + self._first_slot)

    def take_observed(self) -> StepObservation | None:
        """The step that was observed last, with numbers of slots that no other rank has."""
        step, self._observed = self._observed, None
        return step


def _joined(steps: list[PlannedStep]) -> PlannedStep:
    if all(step.is_empty for step in steps):
        return steps[0]
    joint = JointRows.of([step.plan for step in steps])
    first, *others = (replace(step.plan, joint=joint) for step in steps)
    return replace(steps[0], plan=replace(first, others=tuple(others)))
