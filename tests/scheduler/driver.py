"""A scheduler and a FakeExecutor run together in a test, every invariant checked after every call."""

from collections.abc import Callable, Iterable
from typing import Any

from dflash_trt.core.batch import StepSampling
from dflash_trt.core.constraint import TokenConstraint
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.request import Request, SamplingParams, TokenEvent
from dflash_trt.core.step_plan import ExecutorLimits, StepHandle
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from dflash_trt.scheduler.draft_length import FixedDraftLength
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import DraftRule, FakeExecutor, FakeRanks, always_right
from tests.scheduler.counts import Counts
from tests.scheduler.toy_constraint import constrained_tokens


def make_limits(**changes: Any) -> ExecutorLimits:
    """Small enough that every limit is met: 4 places, 20 pages of 4."""
    fields: dict[str, Any] = {
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_num_tokens": 24,
        "max_draft_len": 5,
        "page_size": 4,
        "num_pages": 20,
    }
    return ExecutorLimits(**(fields | changes))


def make_request(
    request_id: str,
    prompt: Iterable[int] = (1, 2, 3),
    *,
    max_new_tokens: int = 12,
    stop_token_ids: Iterable[int] = (),
    seed: int = 0,
    priority: int = 0,
    queue_timeout_s: float | None = None,
    cache_salt: str = "",
    constraint: TokenConstraint | None = None,
    **sampling: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        stop_token_ids=frozenset(stop_token_ids),
        seed=seed,
        priority=priority,
        queue_timeout_s=queue_timeout_s,
        cache_salt=cache_salt,
        constraint=constraint,
    )


class Driver:
    """Runs steps and collects events. `plan_ahead` plans step n+1 before it commits step n."""

    def __init__(self, scheduler: Scheduler | DataParallelScheduler, executor: FakeExecutor | FakeRanks) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.events: list[TokenEvent] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.now = 0.0
        self.counts = Counts()
        self._planned: list[tuple[PlannedStep, StepHandle | None]] = []
        self._num_left: dict[str, int] = {}  # tokens that a request may still emit

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.counts.add(self.scheduler, request.request_id)
        self._num_left[request.request_id] = max_num_emitted(self.executor.limits, request)
        self.scheduler.check_integrity()

    def cancel(self, request_id: str) -> None:
        event = self.scheduler.end(request_id, "cancelled")
        if event is not None:
            self._take([event])

    def step(self) -> list[TokenEvent]:
        """One turn of the plain loop."""
        assert not self._planned
        self._submit()
        return self._commit()

    def step_ahead(self) -> list[TokenEvent]:
        """One turn of the chained loop of `StepRunner`: the next step is planned before the events of the last one."""
        while len(self._planned) < 2 and self._submit():
            pass
        return self._commit(plans_next=True)

    def plan_and_abandon(self, leave: Callable[[list[str]], None] = lambda ids: None) -> None:
        """The next step fails before it runs; some of its requests may leave before that."""
        step = self._plan_another()
        leave([sequence.request_id for sequence in step.sequences])
        self.scheduler.check_integrity()
        self.scheduler.abandon()
        self.scheduler.check_integrity()

    def leave_in_flight(self, leave: Callable[[list[str]], None]) -> None:
        """Let some requests of the newest step leave before anything that runs is committed, which then is."""
        step = self._plan_another()
        self._planned.append((step, None if step.is_empty else self.executor.submit(step.plan)))
        leave([sequence.request_id for sequence in step.sequences])
        self.scheduler.check_integrity()
        self.land()

    def _plan_another(self) -> PlannedStep:
        if len(self._planned) == 2:
            self._commit()
        step = self.scheduler.plan(self.now)
        self.scheduler.check_integrity()
        return step

    def land(self) -> None:
        """Run and commit whatever is planned."""
        while self._planned:
            self._commit()

    def run(self, *, ahead: bool = False, max_steps: int = 2000) -> None:
        """Step until every request has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            if ahead:
                self.step_ahead()
            else:
                self.step()
        self.land()
        assert not self.scheduler.has_work, "the requests do not come to an end"

    def _submit(self) -> bool:
        """Returns False if the step is empty; behind another one it is not kept then."""
        step = self.scheduler.plan(self.now)
        self.scheduler.check_integrity()
        if step.is_empty and self._planned:
            self.scheduler.abandon()
        else:
            self._planned.append((step, None if step.is_empty else self.executor.submit(step.plan)))
        return not step.is_empty

    def _commit(self, *, plans_next: bool = False) -> list[TokenEvent]:
        step, handle = self._planned.pop(0)
        self.scheduler.settle(step, None if handle is None else handle.result())
        if handle is not None:
            self.counts.run(step.plan)
        self.scheduler.check_integrity()
        if plans_next and self.scheduler.has_work:
            self._submit()
        events = self.scheduler.events()
        self.scheduler.check_integrity()
        self._take(events)
        return events

    def _take(self, events: list[TokenEvent]) -> None:
        self.events += events
        self.counts.events += events
        for event in events:
            assert event.request_id not in self.finish_reasons, "an event came after the end of its request"
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            assert event.num_accepted <= event.num_candidates < max(1, self._num_left[event.request_id]), (
                "drafts that could not be emitted are counted"
            )
            self._num_left[event.request_id] -= len(event.token_ids)
            if event.finish_reason is not None:
                self.finish_reasons[event.request_id] = event.finish_reason


def max_num_emitted(limits: ExecutorLimits, request: Request) -> int:
    """Tokens that the request emits unless it stops earlier."""
    room = min(limits.max_seq_len, limits.num_pages * limits.page_size) - len(request.prompt_token_ids)
    return min(request.sampling.max_new_tokens, room)


def expected_tokens(executor: FakeExecutor | FakeRanks, request: Request) -> list[int]:
    """What the request emits when it runs alone, one token at a time."""
    num_tokens = max_num_emitted(executor.limits, request)
    rules, sampling = LogitRules.of(request), scheduled_sampling(request)
    if request.constraint is not None:
        return constrained_tokens(executor.target, request, num_tokens, sampling, rules)
    tokens = executor.target.generate(request.prompt_token_ids, num_tokens, sampling, rules)
    for index, token in enumerate(tokens):
        if token in request.stop_token_ids:
            return tokens[: index + 1]
    return tokens


def scheduled_sampling(request: Request) -> StepSampling:
    return StepSampling(temperature=request.sampling.temperature, seed=request.seed)


def make_driver(
    limits: ExecutorLimits | None = None,
    *,
    num_draft_tokens: int | None = None,
    draft_rule: DraftRule = always_right,
    vocab_size: int = 997,
    **config: Any,
) -> Driver:
    limits = limits or make_limits()
    policy = None if num_draft_tokens is None else FixedDraftLength(num_draft_tokens)
    return Driver(
        Scheduler(limits, SchedulerConfig(**config), policy),
        FakeExecutor(limits, vocab_size=vocab_size, draft_rule=draft_rule),
    )
