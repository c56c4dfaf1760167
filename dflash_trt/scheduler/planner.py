"""Planning of a step's rows: admission, preemption, tokens per request.

Running requests that decode come first (an anchor each, then drafts while the budget lasts), then prompt chunks, both
in order of priority_key. Drafts never take a page or a place from another request.
"""

from dataclasses import dataclass

from dflash_trt.core.batch import ExecutorLimits, ScheduledRequest
from dflash_trt.core.planned_step import FollowUp, PlannedStep
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.draft_length import DraftLengthPolicy
from dflash_trt.scheduler.request_pool import RequestPool
from dflash_trt.scheduler.sequence import InFlightRow, Sequence

# Part of max_num_tokens that drafts leave to waiting prompts. Otherwise a full batch of verify blocks could keep new
# requests from starting.
PREFILL_SHARE = 4


class StepPlanner:
    """Plans steps over a request pool."""

    def __init__(
        self, request_pool: RequestPool, limits: ExecutorLimits, config: SchedulerConfig, policy: DraftLengthPolicy
    ) -> None:
        self._request_pool = request_pool
        self._limits = limits
        self._config = config
        self._policy = policy

    def plan(self, now: float) -> tuple[PlannedStep, list[Sequence]]:
        """Plan the next step; return it with its requests, now marked in flight."""
        num_draft_tokens = self._choose_draft_length()
        self._admit(now, num_draft_tokens)
        rows = self._decode_rows(num_draft_tokens)
        rows += self._prefill_rows(self._limits.max_num_tokens - sum(row.num_tokens for row in rows))
        if not any(row.wants_drafts or row.num_candidates for row in rows):
            num_draft_tokens = 0
        for row in rows:
            row.sequence.in_flight = InFlightRow(
                num_tokens=row.num_tokens, is_emitting=row.is_emitting, num_draft_tokens=num_draft_tokens
            )
        step = PlannedStep(
            rows=tuple(row.row for row in rows), num_draft_tokens=num_draft_tokens, page_size=self._limits.page_size
        )
        return step, [row.sequence for row in rows]

    def _running(self, *, is_decoding: bool) -> list[Sequence]:
        return [
            sequence
            for sequence in self._request_pool.running
            if sequence.is_decoding == is_decoding and not sequence.is_ending
        ]

    def _choose_draft_length(self) -> int:
        num_decoding = len(self._running(is_decoding=True))
        return min(self._policy.choose(num_decoding), self._limits.max_draft_len)

    # Admission

    def _admit(self, now: float, num_draft_tokens: int) -> None:
        """Admit waiting requests in order, while this step has places, pages and tokens for them."""
        budget = self._limits.max_num_tokens - self._num_claimed_tokens(num_draft_tokens)
        while budget > 0:
            sequence = next((waiting for waiting in self._request_pool.waiting if waiting.in_flight is None), None)
            if sequence is None or not self._make_room(sequence):
                return
            self._request_pool.admit(sequence, now)
            budget -= sequence.num_pending

    def _num_claimed_tokens(self, num_draft_tokens: int) -> int:
        """Tokens of this step for running requests, without those that drafts leave to prompts."""
        decoding = self._running(is_decoding=True)
        num_verified = sum(1 + min(sequence.max_candidates, num_draft_tokens) for sequence in decoding)
        max_verified = max(len(decoding), self._limits.max_num_tokens - self._prefill_share)
        return min(num_verified, max_verified) + self._num_prompt_tokens()

    def _num_prompt_tokens(self) -> int:
        """Prompt tokens that running requests have still to compute."""
        return sum(sequence.num_pending for sequence in self._running(is_decoding=False))

    @property
    def _prefill_share(self) -> int:
        return max(1, self._limits.max_num_tokens // PREFILL_SHARE)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt requests of lower priority if needed; return True if `sequence` fits now."""
        if self._fits(sequence, self._request_pool.running, num_freed_pages=0):
            return True
        if not self._config.preempts_for_priority:
            return False
        lower = [
            running for running in self._request_pool.running if running.request.priority < sequence.request.priority
        ]
        staying = self._request_pool.running[: len(self._request_pool.running) - len(lower)]
        if not lower or not self._fits(sequence, staying, num_freed_pages=self._num_own_pages(lower)):
            return False
        while not self._fits(sequence, self._request_pool.running, num_freed_pages=0):
            self._request_pool.preempt(self._request_pool.running[-1])
        return True

    def _fits(self, sequence: Sequence, running: list[Sequence], *, num_freed_pages: int) -> bool:
        """True if there are a place and pages for all tokens, and a spare page for each running request."""
        if len(running) >= self._limits.max_batch_size:
            return False
        num_available = self._request_pool.store.num_available + num_freed_pages
        return self._request_pool.num_missing_pages(sequence) + len(running) <= num_available

    def _num_own_pages(self, sequences: list[Sequence]) -> int:
        """Number of pages that become available when these requests release them."""
        return self._request_pool.store.num_freed_by([sequence.page_ids for sequence in sequences])

    # Rows

    def _decode_rows(self, num_draft_tokens: int) -> list["PlannedRow"]:
        """Rows that decode. All anchors get their pages before any drafts do."""
        decoding = self._running(is_decoding=True)
        decoding = [sequence for sequence in decoding if sequence.is_running and self._secure_anchor(sequence)]
        max_candidates = min(num_draft_tokens, self._max_candidates(len(decoding)))
        return [
            _decode_row(sequence, self._num_candidates_with_pages(sequence, max_candidates), self._limits.page_size)
            for sequence in decoding
        ]

    def _max_candidates(self, num_decoding: int) -> int:
        """Maximum of drafts that each decoding request may verify, leaving tokens to waiting prompts."""
        if num_decoding == 0:
            return 0
        budget = self._limits.max_num_tokens - min(self._num_prompt_tokens(), self._prefill_share)
        return max(0, budget // num_decoding - 1)

    def _secure_anchor(self, sequence: Sequence) -> bool:
        """Get a page for the next token, preempting requests of lowest priority; False if that is `sequence` itself."""
        while not self._request_pool.grow(sequence, sequence.max_context_len + 1):
            victim = self._request_pool.running[-1]
            self._request_pool.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _num_candidates_with_pages(self, sequence: Sequence, max_candidates: int) -> int:
        """Maximum of drafts that budget and pages allow without preemption."""
        num_candidates = min(sequence.max_candidates, max_candidates)
        num_positions = min(sequence.max_context_len + 1 + num_candidates, sequence.max_len)
        if self._request_pool.grow(sequence, num_positions):
            return num_candidates
        return min(num_candidates, len(sequence.page_ids) * self._limits.page_size - sequence.max_context_len - 1)

    def _prefill_rows(self, budget: int) -> list["PlannedRow"]:
        if self._config.max_prefill_tokens is not None:
            budget = min(budget, self._config.max_prefill_tokens)
        rows: list[PlannedRow] = []
        for sequence in self._running(is_decoding=False):
            if budget <= 0:
                break
            rows.append(_prompt_row(sequence, min(sequence.num_pending, budget), self._limits.page_size))
            budget -= rows[-1].num_tokens
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRow:
    """A row of a request. It writes at most `num_tokens` positions."""

    sequence: Sequence
    row: ScheduledRequest | FollowUp
    num_tokens: int
    num_candidates: int = 0
    is_emitting: bool = True

    @property
    def wants_drafts(self) -> bool:
        """True if a draft of this step can still be accepted, with a bonus token after it."""
        in_flight = self.sequence.in_flight  # of the step before this one
        num_sure = 2 if in_flight is not None and in_flight.is_emitting else 1
        return self.is_emitting and self.sequence.num_remaining - num_sure >= 2


def _decode_row(sequence: Sequence, num_candidates: int, page_size: int) -> PlannedRow:
    row: ScheduledRequest | FollowUp
    if sequence.in_flight is None or not sequence.in_flight.is_emitting:
        row = _known_row(sequence, 1, sequence.draft_tokens[:num_candidates], page_size)
    else:
        row = FollowUp(
            request_id=sequence.request_id,
            max_candidates=num_candidates,
            num_remaining=sequence.num_remaining,
            stop_token_ids=sequence.request.stop_token_ids,
            page_ids=tuple(sequence.page_ids),
            sampling=sequence.sampling,
        )
    return PlannedRow(sequence=sequence, row=row, num_tokens=1 + num_candidates, num_candidates=num_candidates)


def _prompt_row(sequence: Sequence, num_tokens: int, page_size: int) -> PlannedRow:
    row = _known_row(sequence, num_tokens, (), page_size)
    is_last = row.context_len + num_tokens == len(sequence.token_ids)
    return PlannedRow(sequence=sequence, row=row, num_tokens=num_tokens, is_emitting=is_last)


def _known_row(sequence: Sequence, num_tokens: int, drafts: tuple[int, ...], page_size: int) -> ScheduledRequest:
    """The next `num_tokens` tokens of the request, then `drafts`."""
    start = sequence.max_context_len
    token_ids = (*sequence.token_ids[start : start + num_tokens], *drafts)
    num_pages = -(-(start + len(token_ids)) // page_size)
    return ScheduledRequest(
        request_id=sequence.request_id,
        token_ids=token_ids,
        context_len=start,
        num_candidates=len(drafts),
        page_ids=tuple(sequence.page_ids[:num_pages]),
        sampling=sequence.sampling,
    )
