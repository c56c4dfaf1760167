"""Planning of a step's rows: admission, preemption, tokens per request.

Running requests that decode come first (an anchor each, then drafts while the budget lasts), then prompt chunks, both
in order of priority_key. Drafts never take a page or a place from another request.
"""

from dataclasses import dataclass

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.logprobs import PromptRows, TopRows
from dflash_trt.core.step_plan import (
    CHAINED,
    NO_PAGE_COPIES,
    ExecutorLimits,
    StateCopies,
    StepPlan,
    StepRows,
    TokenMasks,
)
from dflash_trt.scheduler.admission import Admission
from dflash_trt.scheduler.config import SchedulerConfig
from dflash_trt.scheduler.constrained_rows import allowed_candidates, may_follow, token_masks
from dflash_trt.scheduler.draft_length import DraftLengthPolicy
from dflash_trt.scheduler.ngram_drafts import NgramDrafts
from dflash_trt.scheduler.prompt_logprobs import prompt_rows
from dflash_trt.scheduler.request_pool import RequestPool
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.slots import NO_TOKEN, NO_UPDATES

# Part of max_num_tokens that drafts leave to waiting prompts. Otherwise a full batch of verify blocks could keep new
# requests from starting.
PREFILL_SHARE = 4

_NONE = np.zeros(0, np.int64)
_FLIGHT_STATE = ("is_decoding", "num_drafts", "flight_tokens", "flight_candidates", "flight_emits", "flight_step")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedRows:
    """Rows of a step, and what the scheduler needs to commit them, one entry a row."""

    rows: StepRows
    sequences: list[Sequence]
    epochs: Array  # int64; a row of an earlier epoch wrote pages that are gone
    is_emitting: Array  # bool; False for a prefill chunk that is not the last
    wants_logprobs: bool  # any row
    top_rows: TopRows | None
    prompt_rows: PromptRows | None  # never of a step that repeats
    copies: tuple[StateCopies, StateCopies]  # restores and saves; of a step that repeats none
    version: int  # the request pool's version
    steady: "SteadyState | None"


@dataclass(kw_only=True, slots=True, eq=False)
class SteadyState:
    """All running requests verify all K drafts.

    The next steps have the same rows, until a request arrives or nears its end.
    """

    num_repeats: int  # left, until a row could reach its last token
    room: Array  # int64 [R], positions that the pages of each row hold
    num_pages: int
    token_rows: Array  # int64 [R], where the slots' tokens begin in the flat table
    stop_ids: Array | None  # int64 [R, 1, any]; None if no request has stop ids


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """A plan and its rows. `undo` is the slots' previous state.

    None if the previous step has the same rows.
    """

    plan: StepPlan
    number: int
    planned: PlannedRows
    undo: dict[str, Array] | None

    @property
    def sequences(self) -> list[Sequence]:
        return self.planned.sequences

    @property
    def is_empty(self) -> bool:
        """There is nothing for an executor."""
        return not self.planned.sequences and not len(self.plan.page_copies) and not self.plan.others


class StepPlanner:
    """Plans steps over a request pool."""

    def __init__(
        self, request_pool: RequestPool, limits: ExecutorLimits, config: SchedulerConfig, policy: DraftLengthPolicy
    ) -> None:
        self._request_pool = request_pool
        self._table = request_pool.table
        self._limits = limits
        self._config = config
        self._policy = policy
        self.admission = Admission(request_pool, limits, config)
        self._ngrams = NgramDrafts(request_pool.table) if config.ngram else None
        self._num_steps = 0
        self._last: PlannedRows | None = None

    def plan(self, now: float) -> PlannedStep:
        """Plan the next step, whose rows are in flight then."""
        last = self._steady_rows()
        decoding = self._decoding() if last is None else last.rows.slot_ids
        num_draft_tokens = min(self._policy.choose(len(decoding) or self._num_starting), self._limits.max_draft_len)
        ngram_drafts = {} if self._ngrams is None else self._ngrams.propose(decoding, num_draft_tokens)
        has_budget = num_draft_tokens > 0 and self._policy.has_budget
        if last is not None and last.rows.num_draft_tokens == num_draft_tokens and not ngram_drafts and not has_budget:
            step = self._repeated(last)
            if step is not None:
                return step
        if self._request_pool.waiting:
            self._admit(now, num_draft_tokens)
        slots, num_candidates = self._decode_rows(num_draft_tokens, [*ngram_drafts])
        num_candidates = allowed_candidates(self._table, slots, num_candidates)
        num_tokens, context_lens = num_candidates + 1, np.full(len(slots), CHAINED)
        is_emitting = np.ones(len(slots), bool)
        token_ids = np.zeros(int(num_tokens.sum()), np.int64)
        if self._ngrams is not None:
            self._ngrams.give_rows(ngram_drafts, slots, num_candidates, context_lens=context_lens, token_ids=token_ids)
        scored: PromptRows | None = None
        prompts = self._prompt_chunks(self._limits.max_num_tokens - len(token_ids))
        if prompts:
            chunks = np.array(prompts)
            starts = self._table.max_context_len(chunks[:, 0])
            is_last = starts + chunks[:, 1] == self._table.num_tokens[chunks[:, 0]]
            parts = [
                self._table.token_ids[slot, start : start + count]
                for (slot, count), start in zip(prompts, starts.tolist(), strict=True)
            ]
            wanting = [sequence.prompt_logprobs for sequence in self._sequences(chunks[:, 0])]
            scored = prompt_rows(wanting, parts, starts=starts.tolist(), first_token_row=len(token_ids))
            slots, num_tokens = np.concatenate((slots, chunks[:, 0])), np.concatenate((num_tokens, chunks[:, 1]))
            num_candidates = np.concatenate((num_candidates, np.zeros(len(prompts), np.int64)))
            context_lens, is_emitting = np.concatenate((context_lens, starts)), np.concatenate((is_emitting, is_last))
            token_ids = np.concatenate((token_ids, *parts))
        if not self._wants_drafts(slots, num_candidates, is_emitting):
            num_draft_tokens = 0
        return self._planned(
            slots,
            num_tokens,
            num_candidates,
            context_lens,
            token_ids,
            is_emitting,
            num_draft_tokens=num_draft_tokens,
            prompt_rows=scored,
        )

    @property
    def num_decoding(self) -> int:
        """Requests that the next step's K is for."""
        return len(self._decoding()) or self._num_starting

    def abandon(self, step: PlannedStep, previous: PlannedStep | None) -> None:
        """Take back a plan that did not run, the newest one; `previous` is uncommitted still."""
        slots, table = step.plan.rows.slot_ids, self._table
        live = table.epoch[slots] == step.planned.epochs
        for sequence in step.sequences:
            if sequence.stale_step is not None:
                has_row = previous is not None and sequence in previous.sequences
                sequence.stale_step = previous.number if previous is not None and has_row else None
        if step.undo is None and previous is not None:
            table.flight_step[slots[live]] = previous.number
        elif step.undo is None:
            table.commit_rows(slots[live], step.number)
        else:
            for name, before in step.undo.items():
                getattr(table, name)[slots[live]] = before[live]
        table.take_back_updates(step.plan)
        self._request_pool.store.host.take_back(step.plan.page_copies)
        self._request_pool.states.abandon(slots[live], step=step.number)

    def _planned(
        self,
        slots: Array,
        num_tokens: Array,
        num_candidates: Array,
        context_lens: Array,
        token_ids: Array,
        is_emitting: Array,
        *,
        num_draft_tokens: int,
        prompt_rows: PromptRows | None,
    ) -> PlannedStep:
        table, sequences = self._table, self._sequences(slots)
        rows = StepRows(
            request_ids=tuple([sequence.request.request_id for sequence in sequences]),
            slot_ids=slots,
            num_tokens=num_tokens,
            num_candidates=num_candidates,
            context_lens=context_lens,
            token_ids=token_ids,
            sampling={name: column[slots] for name, column in table.sampling.items()},
            num_draft_tokens=num_draft_tokens,
        )
        self._last = PlannedRows(
            rows=rows,
            sequences=sequences,
            epochs=table.epoch[slots],
            is_emitting=is_emitting,
            wants_logprobs=bool(table.wants_logprobs[slots].any()),
            top_rows=TopRows.of(table.num_top_logprobs[slots] * is_emitting),
            prompt_rows=prompt_rows,
            copies=self._request_pool.states.copies(
                slots, context_lens, num_tokens, is_first=table.flight_tokens[slots] == 0, step=self._num_steps
            ),
            version=self._request_pool.version,
            steady=self._steady_state(rows),
        )
        num_pages = int(table.num_pages[slots].max(initial=1))
        return self._in_flight(self._last, num_pages, token_masks(table, rows, is_emitting))

    def _in_flight(self, planned: PlannedRows, num_pages: int, masks: TokenMasks | None = None) -> PlannedStep:
        """A step of these rows, whose slots now have it in flight."""
        table, rows, slots = self._table, planned.rows, planned.rows.slot_ids
        step = PlannedStep(
            plan=self._step_plan(planned, num_pages, masks),
            number=self._num_steps,
            planned=planned,
            undo={name: getattr(table, name)[slots] for name in _FLIGHT_STATE},
        )
        table.flight_tokens[slots], table.flight_candidates[slots] = rows.num_tokens, rows.num_candidates
        table.flight_emits[slots] = table.is_decoding[slots] = planned.is_emitting
        table.flight_step[slots] = self._num_steps
        table.num_drafts[slots] = rows.num_draft_tokens
        self._num_steps += 1
        return step

    def _step_plan(self, planned: PlannedRows, num_pages: int, masks: TokenMasks | None = None) -> StepPlan:
        restores, saves = planned.copies
        host = self._request_pool.store.host
        return StepPlan(
            planned.rows,
            num_pages,
            *(self._table.take_updates() if planned.sequences else NO_UPDATES),
            masks,
            top_rows=planned.top_rows,
            prompt_rows=planned.prompt_rows,
            restores=restores,
            saves=saves,
            page_copies=host.take_copies() if planned.sequences or host.is_waited_for else NO_PAGE_COPIES,
        )

    def _sequences(self, slots: Array) -> list[Sequence]:
        sequences = [sequence for slot in slots.tolist() if (sequence := self._table.sequences[slot]) is not None]
        assert len(sequences) == len(slots), "a row without a request"
        return sequences

    # Steps that repeat

    def _steady_state(self, rows: StepRows) -> SteadyState | None:
        table, slots, k = self._table, rows.slot_ids, rows.num_draft_tokens
        if len(slots) < len(self._request_pool.running) or not len(slots) or (k and self._policy.has_budget):
            return None
        if not ((rows.num_candidates == k) & (rows.context_lens == CHAINED) & ~table.is_constrained[slots]).all():
            return None
        # Tokens emitted at most: k + 1 each by the step in flight, this one and each repetition; k + 2 must be left.
        num_free = int(table.num_remaining(slots).min()) - (self._limits.max_draft_len + 1) - (k + 2)
        if num_free < k + 1:
            return None
        num_pages = table.num_pages[slots]
        stop_ids = table.stop_ids[slots][:, None, :]
        return SteadyState(
            num_repeats=num_free // (k + 1),
            room=num_pages * self._limits.page_size,
            num_pages=int(num_pages.max()),
            token_rows=slots * table.token_ids.shape[1],
            stop_ids=stop_ids if (stop_ids != NO_TOKEN).any() else None,
        )

    def _steady_rows(self) -> PlannedRows | None:
        """The rows of the last step, if the next one can have no others unless K changes."""
        last, pool = self._last, self._request_pool
        if last is None or last.steady is None or last.version != pool.version or not last.steady.num_repeats:
            return None
        return None if pool.waiting and not self.admission.is_full_for(next(iter(pool.waiting))) else last

    def _repeated(self, last: PlannedRows) -> PlannedStep | None:
        """The last step again; None if pages are short."""
        table, rows, steady = self._table, last.rows, last.steady
        assert steady is not None
        slots, width = rows.slot_ids, rows.num_draft_tokens + 1
        is_chained = bool(table.flight_tokens[slots[0]])
        margin = 2 * width if is_chained else width
        context_lens = table.context_len[slots]
        is_short = context_lens > steady.room - margin
        if is_short.any():
            short = np.flatnonzero(is_short)
            page_size, of_short = self._limits.page_size, slots[short]
            num_new = -(-(context_lens[short] + margin) // page_size) - table.num_pages[of_short]
            if not self._request_pool.grow_all(of_short, num_new):
                return None
            steady.room[short] = table.num_pages[of_short] * page_size
            steady.num_pages = max(steady.num_pages, int(table.num_pages[of_short].max()))
        steady.num_repeats -= 1
        if not is_chained:
            return self._in_flight(last, steady.num_pages)
        number, self._num_steps = self._num_steps, self._num_steps + 1
        table.flight_step[slots] = number
        plan = self._step_plan(last, steady.num_pages)
        return PlannedStep(plan=plan, number=number, planned=last, undo=None)

    def _wants_drafts(self, slots: Array, num_candidates: Array, is_emitting: Array) -> bool:
        """True if drafts are verified, or one of this step can still be accepted, with a bonus token after it."""
        if num_candidates.any() or self._policy.is_joint:
            return True
        num_left = self._table.num_remaining(slots) - self._table.num_sure(slots) - 1
        return bool((is_emitting & (num_left >= 2)).any())

    def _decoding(self) -> Array:
        """Decoding slots by priority, except if they await an uncommitted row or surely have their last token."""
        table, slots = self._table, self._request_pool.running_slots
        is_decoding = table.is_decoding[slots] & (table.num_remaining(slots) > table.num_sure(slots))
        decoding: Array = slots[is_decoding & may_follow(table, slots)]
        return decoding

    def _prompting(self) -> Array:
        """Slots whose prompts are not planned to their end, by priority."""
        slots = self._request_pool.running_slots
        prompting: Array = slots[~self._table.is_decoding[slots]]
        return prompting

    # Admission

    def _admit(self, now: float, num_draft_tokens: int) -> None:
        """Admit waiting requests in order, while this step has places, pages and tokens for them."""
        budget = self._limits.max_num_tokens - self._num_claimed_tokens(num_draft_tokens)
        while budget > 0:
            sequence = self.admission.next_waiting()
            if sequence is None or not self.admission.make_room(sequence):
                return
            self._request_pool.admit(sequence, now)
            budget -= int(self._table.num_pending(sequence.slot))

    @property
    def _num_starting(self) -> int:
        """Requests whose first drafts are verified once their prompts are computed."""
        num_requests = len(self._request_pool.running) + len(self._request_pool.waiting)
        return min(num_requests, self._limits.max_batch_size)

    def _num_claimed_tokens(self, num_draft_tokens: int) -> int:
        """Tokens of this step for running requests, without those that drafts leave to prompts."""
        decoding = self._decoding()
        num_verified = int((1 + np.minimum(self._table.max_candidates(decoding), num_draft_tokens)).sum())
        max_verified = max(len(decoding), self._limits.max_num_tokens - self._prefill_share)
        return min(num_verified, max_verified) + self._num_prompt_tokens()

    def _num_prompt_tokens(self) -> int:
        """Prompt tokens that running requests have still to compute."""
        return int(self._table.num_pending(self._prompting()).sum())

    @property
    def _prefill_share(self) -> int:
        return max(1, self._limits.max_num_tokens // PREFILL_SHARE)

    # Rows

    def _decode_rows(self, num_draft_tokens: int, ngram_slots: list[int]) -> tuple[Array, Array]:
        """Slots that decode, and the drafts that each verifies; the policy limits those of the drafter."""
        slots, table = self._decoding(), self._table
        if not len(slots):
            return slots, _NONE
        num_candidates = np.minimum(
            table.max_candidates(slots), min(num_draft_tokens, self._max_candidates(len(slots)))
        )
        if self._policy.has_budget:
            confidence = np.where(table.flight_tokens[slots, None] > 0, np.nan, table.draft_confidence[slots])
            is_ngram = np.isin(slots, ngram_slots)
            confidence[is_ngram] = np.nan
            limited = self._policy.limit(slots, table.epoch[slots], num_candidates, confidence)
            num_candidates = np.where(is_ngram, num_candidates, limited)
        ends = table.max_context_len(slots) + 1 + num_candidates
        if self._request_pool.grow_all(slots, -(-ends // self._limits.page_size) - table.num_pages[slots]):
            return slots, num_candidates
        return self._rows_short_of_pages(slots.tolist(), num_draft_tokens)

    def _rows_short_of_pages(self, slots: list[int], num_draft_tokens: int) -> tuple[Array, Array]:
        """All anchors get their pages before any drafts do."""
        sequences = [self._table.sequences[slot] for slot in slots]
        secured = [sequence for sequence in sequences if sequence is not None and self._secure_anchor(sequence)]
        rows = np.array([sequence.slot for sequence in secured if sequence.is_running], np.int64)
        if not len(rows):
            return rows, _NONE
        most = np.minimum(self._table.max_candidates(rows), min(num_draft_tokens, self._max_candidates(len(rows))))
        counts = [
            self._num_candidates_with_pages(slot, n) for slot, n in zip(rows.tolist(), most.tolist(), strict=True)
        ]
        return rows, np.array(counts)

    def _max_candidates(self, num_decoding: int) -> int:
        """Maximum of drafts that each decoding request may verify, leaving tokens to waiting prompts."""
        budget = self._limits.max_num_tokens
        if num_decoding < len(self._request_pool.running):
            budget -= min(self._num_prompt_tokens(), self._prefill_share)
        return max(0, budget // num_decoding - 1)

    def _secure_anchor(self, sequence: Sequence) -> bool:
        """Get a page for the next token, preempting requests of lowest priority; False if that is `sequence`.

        A row after an uncommitted one needs pages for the longest outcome, and window pages as of before its commit.
        For those it waits a step and preempts no request.
        """
        if sequence.slot is None:  # preempted for another one
            return False
        num_positions = int(self._table.max_context_len(sequence.slot)) + 1
        while not self._request_pool.grow(sequence.slot, num_positions):
            if self._request_pool.may_need_less(sequence.slot):
                return False
            victim = self._request_pool.running[-1]
            self._request_pool.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _num_candidates_with_pages(self, slot: int, num_candidates: int) -> int:
        """Maximum of drafts that pages allow without preemption."""
        start = int(self._table.max_context_len(slot)) + 1
        if self._request_pool.grow(slot, start + num_candidates):
            return num_candidates
        return min(num_candidates, int(self._table.num_pages[slot]) * self._limits.page_size - start)

    def _prompt_chunks(self, budget: int) -> list[tuple[int, int]]:
        if self._config.max_prefill_tokens is not None:
            budget = min(budget, self._config.max_prefill_tokens)
        return self._request_pool.prompt_chunks(self._prompting(), budget, max_scores=self._limits.max_prompt_scores)
