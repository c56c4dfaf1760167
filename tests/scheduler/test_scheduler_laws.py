"""Any order of arrivals, steps, cancellations, preemptions and prefix hits: same tokens, no page or snapshot leaked."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_trt.core.array import Array
from dflash_trt.core.errors import QueueFullError
from dflash_trt.core.request import Request
from dflash_trt.core.step_plan import ExecutorLimits, PageWindow
from dflash_trt.scheduler import ngram_index
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy
from dflash_trt.scheduler.scheduler import Scheduler
from tests.fake_executor import DraftRule, FakeExecutor, right_with_probability
from tests.scheduler.driver import Driver, expected_tokens, make_limits, make_request
from tests.scheduler.toy_constraint import ToyConstraint

LENGTHS, ONE_IN = st.integers(1, 20), st.sampled_from([2, 3, 8])
HOW_TO_LEAVE = st.sampled_from(["not at all", "cancel", "preempt", "preempt and cancel", "pause"])


class AnyK(DraftLengthPolicy):
    """A draft length policy that the test turns. With a budget, a row in turn verifies one draft more than the last."""

    lengths = tuple(range(6))
    has_budget = False

    def __init__(self) -> None:
        self.num_draft_tokens = 0

    def choose(self, num_decoding: int) -> int:
        return self.num_draft_tokens

    def limit(self, slots: Array, epochs: Array, num_candidates: Array, confidence: Array) -> Array:
        return np.minimum(num_candidates, np.arange(len(slots)) % 4) if self.has_budget else num_candidates

    def observe(self, step: Any) -> None:
        pass


class ServingMachine(RuleBasedStateMachine):
    """Prompts share beginnings, so that pages are shared; pages are few, so that requests are preempted
    and prefixes leave the device."""

    @initialize(
        num_pages=st.integers(8, 24),
        page_size=st.sampled_from([1, 3, 4]),
        max_num_tokens=st.integers(4, 20),
        max_draft_len=st.integers(0, 5),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        num_snapshots=st.sampled_from([None, 0, 1, 3]),
        windows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 8)), max_size=2),
        num_host_pages=st.sampled_from([0, 1, 3, 8, 40]),
        num_host_snapshots=st.sampled_from([0, 1, 4]),
        preempts_for_priority=st.booleans(),
        max_prefill_tokens=st.sampled_from([None, None, 3, 30]),
        max_queue_len=st.sampled_from([None, 3]),
        is_ahead=st.booleans(),
        right=st.sampled_from([0.0, 0.6, 1.0]),
        min_match=st.sampled_from([None, None, 1, 2]),
    )
    def open(
        self,
        num_pages: int,
        page_size: int,
        max_num_tokens: int,
        max_draft_len: int,
        enable_prefix_caching: bool,
        num_snapshots: int | None,
        windows: list[tuple[int, int]],
        num_host_pages: int,
        num_host_snapshots: int,
        preempts_for_priority: bool,
        max_prefill_tokens: int | None,
        max_queue_len: int | None,
        is_ahead: bool,
        right: float,
        min_match: int | None,
    ) -> None:
        limits = make_limits(
            max_seq_len=40,
            num_pages=num_pages,
            page_size=page_size,
            max_num_tokens=max_num_tokens,
            max_draft_len=max_draft_len,
            num_snapshots=num_snapshots,
            num_host_pages=num_host_pages,
            num_host_snapshots=num_host_snapshots,
        )
        claim = 2 * (max_draft_len + 1) + 2 * page_size  # of one request, beside its window: at least what it needs
        groups = [PageWindow(window, (window + claim) // page_size + spare) for window, spare in windows]
        limits = replace(limits, page_windows=tuple(groups))
        self.policy = AnyK()
        config = SchedulerConfig(
            enable_prefix_caching=enable_prefix_caching,
            preempts_for_priority=preempts_for_priority,
            max_prefill_tokens=max_prefill_tokens,
            max_queue_len=max_queue_len,
            max_paused_s=None,
            ngram=min_match is not None,
        )
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ngram_index, "MIN_MATCH", min_match)  # short, for the target never copies
        self.driver = self._driver(limits, config, right_with_probability(right))
        self.is_ahead = is_ahead
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.cut_short: set[str] = set()

    def _driver(self, limits: ExecutorLimits, config: SchedulerConfig, draft_rule: DraftRule) -> Driver:
        executor = FakeExecutor(limits, vocab_size=11, draft_rule=draft_rule)
        return Driver(Scheduler(limits, config, self.policy), executor)

    @rule(
        shared=st.integers(0, 2),
        num_shared=st.integers(0, 9),
        own=st.lists(st.integers(0, 10), max_size=6),
        max_new_tokens=st.integers(1, 14),
        stop_token_ids=st.sets(st.integers(0, 10), max_size=1),
        temperature=st.sampled_from([0.0, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 2.0]),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
        queue_timeout_s=st.sampled_from([None, None, 2.0]),
        cache_salt=st.sampled_from(["", "other"]),
        constraint=st.none() | st.builds(ToyConstraint, length=LENGTHS, one_in=ONE_IN, vocab_size=st.just(11)),
    )
    def add(self, shared: int, num_shared: int, own: list[int], **fields: Any) -> None:
        capacity = min(40, self.driver.executor.limits.num_pages * self.driver.executor.limits.page_size)
        prompt = ([shared] * num_shared + own)[: capacity - 1] or [0]
        self._add(make_request(f"r{len(self.requests)}", prompt, **fields))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 2))
    def add_again(self, data: st.DataObject, count: int) -> None:
        """The same prompt at once, or while or after it is computed."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        for _ in range(count):
            self._add(replace(request, request_id=f"r{len(self.requests)}"))

    def _add(self, request: Request) -> None:
        try:
            self.driver.add(request)
        except QueueFullError:
            assert self.driver.scheduler.num_waiting >= 3
            return
        self.requests[request.request_id] = request
        self.expected[request.request_id] = expected_tokens(self.driver.executor, request)

    @rule(num_draft_tokens=st.integers(0, 5), has_budget=st.booleans())
    def change_k(self, num_draft_tokens: int, has_budget: bool) -> None:
        self.policy.num_draft_tokens, self.policy.has_budget = num_draft_tokens, has_budget

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.now += 1.0
            if self.is_ahead:
                self.driver.step_ahead()
            else:
                self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self._cancel(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.driver.scheduler.preempt(data.draw(st.sampled_from(sorted(self.requests))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_resuming=st.booleans())
    def park_or_resume(self, data: st.DataObject, is_resuming: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if is_resuming:
            self.driver.scheduler.resume(request_id)
        else:
            self.driver.scheduler.pause(request_id)

    @rule(data=st.data(), how=HOW_TO_LEAVE, is_abandoned=st.booleans())
    def leave_in_flight(self, data: st.DataObject, how: str, is_abandoned: bool) -> None:
        """A request of the newest step leaves before that step is committed, or dropped because it did not run."""

        def leave(request_ids: list[str]) -> None:
            if request_ids:
                self._leave(data.draw(st.sampled_from(request_ids)), how)

        (self.driver.plan_and_abandon if is_abandoned else self.driver.leave_in_flight)(leave)

    def _leave(self, request_id: str, how: str) -> None:
        if "preempt" in how:
            self.driver.scheduler.preempt(request_id)
        if "cancel" in how:
            self._cancel(request_id)
        if how == "pause":
            self.driver.scheduler.pause(request_id)

    def _cancel(self, request_id: str) -> None:
        if request_id in self.driver.scheduler.request_ids():  # it has not ended, though that may not be told yet
            self.cut_short.add(request_id)
        self.driver.cancel(request_id)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.check_integrity()

    @invariant()
    def tokens_so_far_are_right(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request_id, tokens in self.driver.tokens.items():
            assert tokens == self.expected[request_id][: len(tokens)], request_id

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            self._finish()
        finally:
            self.patch.undo()

    def _finish(self) -> None:
        for request_id in self.requests:
            self.driver.scheduler.resume(request_id)
        self.driver.run(ahead=self.is_ahead)
        assert set(self.driver.finish_reasons) == set(self.requests), "a request was lost"
        for request_id, reason in self.driver.finish_reasons.items():
            tokens = self.driver.tokens[request_id]
            if reason in ("stop", "length"):
                request = self.requests[request_id]
                is_complete = request.constraint is not None and len(tokens) == request.constraint.length
                assert tokens == self.expected[request_id]
                assert (reason == "stop") == (tokens[-1] in request.stop_token_ids or is_complete)
            else:
                assert reason == ("cancelled" if request_id in self.cut_short else "timeout")
        self.driver.counts.check(self.driver.scheduler)
        for scheduler in getattr(self.driver.scheduler, "ranks", [self.driver.scheduler]):
            assert scheduler.num_pages_in_use == 0, "pages leaked"
            assert scheduler.num_window_pages_in_use == 0, "pages of windows leaked"
            assert scheduler.num_snapshots_in_use == 0, "snapshots leaked"


TestServing = ServingMachine.TestCase
TestServing.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
