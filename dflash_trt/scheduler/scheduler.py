"""The scheduler: plans steps, and commits their results to requests.

The synchronous loop is `step = plan(now); result = executor.submit(step.plan).result(); events = commit(step, result)`.
The chained loop plans and submits the next step before it reads the results of the running one. One thread, and
deterministic: the same calls give the same plans.
"""

import logging
from collections import deque
from typing import Final

import numpy as np

from dflash_trt.core.errors import CapacityError, RequestError, problem, raise_all
from dflash_trt.core.prefix_watcher import PrefixWatcher
from dflash_trt.core.request import FinishReason, Request, TokenEvent
from dflash_trt.core.step_plan import ExecutorLimits, StepResult
from dflash_trt.scheduler.commit import CommittedStep, Committer, StepCounts
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import BatchSizeDraftLength, DraftLengthPolicy, FixedDraftLength, StepObservation
from dflash_trt.scheduler.page_store import PageStore
from dflash_trt.scheduler.planner import PlannedStep, StepPlanner
from dflash_trt.scheduler.request_pool import RequestPool
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.slot_windows import SlotWindows
from dflash_trt.scheduler.slots import SlotTable
from dflash_trt.scheduler.statistics import SchedulerStatistics, acceptance_rates
from dflash_trt.scheduler.stored_prefixes import StoredPrefixes

_LOG = logging.getLogger(__name__)
_PROMPT_WIDTHS: Final = 4  # a step of more tokens than so many verify blocks for each request is one of prompts


class Scheduler:
    """Steps are committed in the order they were planned; at most two are uncommitted at a time.

    `policy` chooses K (default: the engine's max_draft_len).
    """

    def __init__(
        self, limits: ExecutorLimits, config: SchedulerConfig | None = None, policy: DraftLengthPolicy | None = None
    ) -> None:
        if limits.max_num_tokens < limits.max_batch_size:
            raise CapacityError.about(
                "max_num_tokens",
                expected=f"at least max_batch_size {limits.max_batch_size}",
                found=str(limits.max_num_tokens),
                hint="Every request needs at least one token per step: build with a larger max_num_tokens.",
            )
        self.limits = limits
        self.config = config or SchedulerConfig()
        self._policy = policy or FixedDraftLength(limits.max_draft_len)
        store = PageStore(
            limits.num_pages,
            limits.page_size,
            keeps_prefixes=self.config.enable_prefix_caching,
            num_snapshots=limits.num_snapshots,
            windows=limits.page_windows,
            num_host_pages=limits.num_host_pages,
            num_host_snapshots=limits.num_host_snapshots,
        )
        table = SlotTable(limits)
        windows = SlotWindows(store.windows, table, limits)
        self._request_pool = RequestPool(store, table, windows, max_queue_len=self.config.max_queue_len)
        self._planner = StepPlanner(self._request_pool, limits, self.config, self._policy)
        self._planned: deque[PlannedStep] = deque()  # and uncommitted, the running one first
        self._committed: CommittedStep | None = None  # whose events are not read
        self._ended: list[TokenEvent] = []  # for the next commit
        self._num_arrivals = 0
        self.counts = StepCounts(limits.max_draft_len)
        self._committer = Committer(self._request_pool, self.counts.num_finished)
        self._now = 0.0
        self._stored: StoredPrefixes | None = None
        self.prompt_rate: float | None = None  # tokens of prompts per second, about

    # Arrivals and departures

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. `now` is a time in seconds of any monotonic clock.

        Raises:
            RequestError: it can never run (empty, too long, id in use), or too many wait (QueueFullError).
        """
        self._now = now
        if request.request_id in self._request_pool:
            raise RequestError.about(
                "request id", expected="a new one", found=f"{request.request_id!r}, in use", hint="Choose another."
            )
        check_fits(request, self.limits)
        self._request_pool.enqueue(Sequence.of(request, now, index=self._num_arrivals, max_len=max_len_of(self.limits)))
        self._num_arrivals += 1

    def adopt(self, sequence: Sequence, now: float) -> None:
        """Queue a request that waits nowhere: a new one of `check_fits`, or one that another scheduler gave up."""
        self._now = now
        self._request_pool.adopt(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """Forget a waiting request, which another scheduler adopts."""
        self._request_pool.remove(sequence)

    def next_waiting(self) -> Sequence | None:
        """The request that runs next, once there is room."""
        return self._planner.admission.next_waiting()

    def has_room_for(self, sequence: Sequence) -> bool:
        """True if a request could run in the next step, and preempt none."""
        return self._planner.admission.fits(sequence)

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """Tokens that a request would have to compute here, without its cached prefix."""
        return self._request_pool.num_missing_tokens(sequence)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._request_pool

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> TokenEvent | None:
        """End a request now, "cancelled", "stop" or with an `error`; None if there is no such request."""
        sequence = self._request_pool.find(request_id)
        if sequence is None:
            return None
        sequence.finish_reason = reason
        self._request_pool.remove(sequence)
        self.counts.num_finished[reason] += 1
        return TokenEvent(
            request_id=request_id,
            token_ids=(),
            finish_reason=reason,
            error=error,
            statistics=sequence.statistics(self._now),
        )

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue, to be computed again; False if it is not running."""
        sequence = self._request_pool.find(request_id)
        if sequence is None or not sequence.is_running:
            return False
        self._request_pool.preempt(sequence)
        return True

    def request_ids(self) -> set[str]:
        """Ids of all requests that have not ended."""
        return self._request_pool.request_ids()

    def pause(self, request_id: str) -> bool:
        """Pause a request until `resume`, and free its place and pages; False if there is no such request."""
        sequence = self._request_pool.find(request_id)
        if sequence is None or sequence.paused_s is not None:
            return False
        self._request_pool.pause(sequence)
        sequence.paused_s = self._now
        return True

    def resume(self, request_id: str) -> bool:
        """Resume a paused request; False if it is not paused."""
        sequence = self._request_pool.find(request_id)
        if sequence is None or sequence.paused_s is None:
            return False
        sequence.paused_s = None
        self._request_pool.resume(sequence)
        return True

    def set_aside(self, request_id: str) -> None:
        """Keep a waiting request from its turn until `take_up`: its prefix is on its way."""
        sequence = self._request_pool.find(request_id)
        assert sequence is not None and not sequence.is_running
        self._request_pool.pause(sequence)

    def take_up(self, request_id: str) -> None:
        """Put a request that was set aside back to its place in the queue, if it has not ended."""
        sequence = self._request_pool.find(request_id)
        if sequence is not None and request_id in self._request_pool.paused and sequence.paused_s is None:
            self._request_pool.resume(sequence)

    def stored_prefixes(self, root: bytes, *, publishes_all: bool = False) -> StoredPrefixes:
        """The blocks of the prefix cache, for a store that is for `root`; see StoredPrefixes."""
        self._stored = StoredPrefixes(self._request_pool.store, root, publishes_all=publishes_all)
        return self._stored

    @property
    def num_running(self) -> int:
        return len(self._request_pool.running)

    @property
    def num_decoding(self) -> int:
        """Requests that the next step's K is chosen for."""
        return self._planner.num_decoding

    @property
    def num_waiting(self) -> int:
        return len(self._request_pool.waiting)

    @property
    def num_pages_in_use(self) -> int:
        """Pages that requests hold, without idle cached ones."""
        return self._request_pool.store.num_in_use

    @property
    def num_window_pages_in_use(self) -> int:
        """Pages that requests hold for layers with windows, of all groups."""
        return self._request_pool.windows.num_pages_in_use

    @property
    def num_snapshots_in_use(self) -> int:
        """Snapshots of recurrent state that steps save or requests begin with, without idle ones."""
        return self._request_pool.store.snapshots.num_in_use

    @property
    def has_work(self) -> bool:
        """True if a request can run, the next commit has an event, or copies for a store wait for a step."""
        pool = self._request_pool
        return bool(pool.running or pool.waiting or self._ended or pool.store.host.is_waited_for)

    @property
    def num_paused(self) -> int:
        return len(self._request_pool.paused)

    def statistics(self) -> SchedulerStatistics:
        """A copy of the counts so far."""
        request_pool, counts = self._request_pool, self.counts
        blocks = counts.blocks
        num_aside = sum(sequence.paused_s is None for sequence in request_pool.paused.values())
        num_blocks, num_accepted = int(blocks.sum()), int((blocks * np.arange(blocks.shape[1])).sum())
        return SchedulerStatistics(
            num_arrivals=self._num_arrivals,
            num_finished=dict(counts.num_finished),
            num_waiting_now=len(request_pool.waiting) + num_aside,
            num_running_now=len(request_pool.running),
            num_paused_now=len(request_pool.paused) - num_aside,
            num_steps=counts.num_steps,
            num_steps_by_draft_length=dict(sorted(counts.num_steps_by_draft_length.items())),
            num_computed_tokens=counts.num_computed_tokens,
            num_verify_blocks=num_blocks,
            num_draft_tokens=int((blocks.sum(1) * np.arange(1, len(blocks) + 1)).sum()),
            num_accepted_tokens=num_accepted,
            num_emitted_by_verify=num_accepted + num_blocks,
            acceptance_by_position=acceptance_rates(blocks),
            num_preemptions=request_pool.num_preemptions,
            num_admitted_prompt_tokens=request_pool.num_admitted_prompt_tokens,
            num_prefix_hit_tokens=request_pool.num_prefix_hit_tokens,
            num_pages=self.limits.num_pages,
            num_pages_in_use_now=request_pool.store.num_in_use,
            num_pages_kept_now=request_pool.store.num_kept,
            num_evicted_pages=request_pool.store.num_evicted_pages,
            num_window_pages=sum(window.num_pages for window in self.limits.page_windows),
            num_window_pages_in_use_now=request_pool.windows.num_pages_in_use,
            num_host_pages=self.limits.num_host_pages,
            num_host_pages_kept_now=request_pool.store.host.num_kept,
            num_offloaded_pages=request_pool.store.host.num_offloaded_pages,
            num_onboarded_pages=request_pool.store.host.num_onboarded_pages,
            num_saved_blocks=0 if self._stored is None else self._stored.num_saved,
            num_loaded_blocks=0 if self._stored is None else self._stored.num_loaded,
            num_ngram_draft_tokens=counts.num_ngram_draft_tokens,
            num_ngram_accepted_tokens=counts.num_ngram_accepted_tokens,
        )

    # Steps

    def plan(self, now: float = 0.0) -> PlannedStep:
        """The next step, without rows if nothing can run. At most one other is uncommitted.

        Every plan is committed or abandoned.
        """
        assert len(self._planned) <= 1, "a step may be planned while one runs, not while two do"
        self.expire(now)
        step = self._planner.plan(now)
        self._planned.append(step)
        return step

    def expire(self, now: float) -> None:
        """End requests that waited or paused too long; the next commit has their events. `plan` calls this."""
        self._now = now
        for sequence in self._request_pool.waiting.expired(now):
            message = problem(
                f"request {sequence.request_id!r}",
                expected=f"a first step within {sequence.request.queue_timeout_s} s",
                found=f"{now - sequence.arrived_s:.3f} s in the queue",
                hint="Try again later, or raise queue_timeout_s.",
            )
            self._time_out(sequence, message)
        max_paused_s = self.config.max_paused_s
        for sequence in list(self._request_pool.paused.values()):
            if max_paused_s is not None and sequence.paused_s is not None and now - sequence.paused_s >= max_paused_s:
                message = problem(
                    f"request {sequence.request_id!r}",
                    expected=f"a reader that takes its tokens within {max_paused_s} s",
                    found=f"{now - sequence.paused_s:.3f} s without one",
                    hint="Read the stream, or raise max_paused_s.",
                )
                self._time_out(sequence, message)

    def commit(
        self, step: PlannedStep, result: StepResult | None, *, elapsed_s: float | None = None
    ) -> list[TokenEvent]:
        """Commit the oldest planned step, and return its events: see `settle` and `events`."""
        self.settle(step, result)
        return self.events(elapsed_s=elapsed_s)

    def settle(self, step: PlannedStep, result: StepResult | None) -> None:
        """Commit the oldest planned step as far as the next plan needs it; None is the result without rows.

        Rows of requests that have ended are ignored. A row that breaks the step contract ends its request with "error",
        without effect on others.
        """
        assert self._planned.popleft() is step, "steps are committed in the order in which they were planned"
        self._request_pool.store.host.settle(step.plan.page_copies)
        if result is not None and step.sequences:
            self._committed = self._committer.commit(step, result)

    def events(self, *, elapsed_s: float | None = None) -> list[TokenEvent]:
        """Events of requests that ended while waiting, then those of the rows of the step that `settle` committed."""
        events, self._ended = self._ended, []
        committed, self._committed = self._committed, None
        if committed is None:
            return events
        events += self._committer.events(committed)
        self.counts.add(committed)
        self._note_prompt_rate(committed, elapsed_s)
        if isinstance(self._policy, BatchSizeDraftLength):
            return events  # nothing to learn
        try:
            self._policy.observe(_observation(committed, elapsed_s))
        except Exception:  # noqa: BLE001 - the step's events must not be lost
            _LOG.exception("the draft length policy could not observe a step")
        return events

    def abandon(self) -> None:
        """Drop the newest planned step, which did not run."""
        step = self._planned.pop()
        self._planner.abandon(step, self._planned[-1] if self._planned else None)

    def lose_device(self, reason: str) -> list[TokenEvent]:
        """Fail the running requests with `reason`: the device's state is gone. Waiting ones keep their place."""
        while self._planned:
            self.abandon()
        failed = [self.end(sequence.request_id, "error", reason) for sequence in list(self._request_pool.running)]
        self._request_pool.store.forget_idle()
        return [event for event in failed if event is not None]

    def watch_prefixes(self, watcher: PrefixWatcher | None) -> None:
        """See `PageStore.watch`."""
        self._request_pool.store.watch(watcher)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between two calls: pages, places, progress."""
        self._request_pool.check_integrity()

    # Inside

    def _note_prompt_rate(self, committed: CommittedStep, elapsed_s: float | None) -> None:
        """Of steps that mostly compute prompts."""
        rows = committed.step.plan.rows
        if not elapsed_s or rows.total_tokens <= _PROMPT_WIDTHS * rows.num_requests * (rows.num_draft_tokens + 1):
            return
        rate = rows.total_tokens / elapsed_s
        self.prompt_rate = rate if self.prompt_rate is None else (self.prompt_rate + rate) / 2

    def _time_out(self, sequence: Sequence, message: str) -> None:
        event = self.end(sequence.request_id, "timeout", message)
        assert event is not None
        self._ended.append(event)


def max_len_of(limits: ExecutorLimits) -> int:
    """Maximum of prompt plus emitted tokens: max_seq_len, or the positions of all pages if fewer."""
    return min(limits.max_seq_len, limits.num_pages * limits.page_size)


def check_fits(request: Request, limits: ExecutorLimits) -> None:
    """Refuse a request that cannot emit any token, or asks for sampling that the executor has not.

    Raises:
        RequestError: the prompt is empty or too long, or its constraint is not compiled.
    """
    _check_sampling(request)
    num_prompt_tokens = len(request.prompt_token_ids)
    subject = f"request {request.request_id!r} prompt"
    if num_prompt_tokens == 0:
        raise RequestError.about(subject, expected="at least 1 token", found="0", hint="Pass a prompt.")
    if num_prompt_tokens > limits.max_seq_len - 1:
        raise RequestError.about(
            subject,
            expected=f"at most {limits.max_seq_len - 1} tokens (max_seq_len - 1)",
            found=str(num_prompt_tokens),
            hint="Shorten the prompt, or build the engine with a larger max_seq_len.",
        )
    if num_prompt_tokens > max_len_of(limits) - 1:
        raise RequestError.about(
            subject,
            expected=f"at most {max_len_of(limits) - 1} tokens ({limits.num_pages} pages of {limits.page_size})",
            found=str(num_prompt_tokens),
            hint="Shorten the prompt, or give the engine more K/V memory.",
        )


def _observation(committed: CommittedStep, elapsed_s: float | None) -> StepObservation:
    plan = committed.step.plan
    is_prompt = plan.rows.num_tokens > plan.rows.num_candidates + 1
    return StepObservation(
        num_draft_tokens=plan.rows.num_draft_tokens,
        num_prefill_tokens=int(plan.rows.num_tokens[is_prompt].sum()),
        slots=plan.rows.slot_ids[~is_prompt],
        epochs=committed.step.planned.epochs[~is_prompt],
        num_candidates=committed.num_candidates[~is_prompt],
        num_accepted=committed.num_accepted[~is_prompt],
        elapsed_s=None if len(plan.page_copies) else elapsed_s,  # the time of copies says nothing of K
    )


def _check_sampling(request: Request) -> None:
    field = request.sampling.grammar_field
    if field is not None and request.constraint is None:
        hint = "Submit it through LLM or Generator, which compile it, or pass the Request its `constraint`."
        missing = problem(f"sampling {field}", expected="its compiled constraint", found="none", hint=hint)
        raise_all(RequestError, f"request {request.request_id!r} sampling", [missing])
