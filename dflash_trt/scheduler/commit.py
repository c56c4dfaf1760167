"""Commits a step's result: first state for the next plan, for all rows at once, then requests' events.

The second part does not delay the next step. Counts what was committed.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import isnan

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.constraint import ConstraintError
from dflash_trt.core.errors import problem
from dflash_trt.core.logprobs import TopTokens
from dflash_trt.core.request import FinishReason, Request, RequestStatistics, TokenEvent
from dflash_trt.core.step_plan import CHAINED, StepResult, StepRows
from dflash_trt.scheduler.constrained_rows import advance, refusal
from dflash_trt.scheduler.planner import PlannedStep
from dflash_trt.scheduler.prompt_logprobs import collect_prompt_logprobs
from dflash_trt.scheduler.request_pool import RequestPool

_LOG = logging.getLogger(__name__)
_ONE = np.int64(1)


@dataclass(kw_only=True, slots=True)
class Ending:
    """The end of a request in a step."""

    reason: FinishReason
    statistics: RequestStatistics
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CommittedStep:
    """A step whose rows are committed; one entry a row."""

    step: PlannedStep
    result: StepResult
    num_emitted: Array  # tokens that count, cut after a stop token and at max_len; 0 for rows that emit none
    num_candidates: Array  # as far as they could be emitted; 0 for rows without a token at their end
    num_accepted: Array  # accepted ones among the tokens that count
    is_finite: Array  # bool
    endings: dict[int, Ending] = field(default_factory=dict)


class Committer:
    """Commits steps to the requests of a pool."""

    def __init__(self, request_pool: RequestPool, num_finished: Counter[FinishReason]) -> None:
        self._request_pool = request_pool
        self._table = request_pool.table
        self._num_finished = num_finished
        self._columns = np.arange(self._table.token_ids.shape[1])
        self._flat_tokens = self._table.token_ids.reshape(-1)

    def commit(self, step: PlannedStep, result: StepResult) -> CommittedStep:
        """Commit the tokens of every row and end finished requests. Rows of other epochs give tokens, no K/V."""
        if result.draft_confidence is not None:
            slots = step.plan.rows.slot_ids
            is_live = self._table.epoch[slots] == step.planned.epochs
            width = result.draft_confidence.shape[1]
            self._table.draft_confidence[slots[is_live], :width] = result.draft_confidence[is_live]
        if step.plan.prompt_rows is not None:
            collect_prompt_logprobs(step.plan, [row.prompt_logprobs for row in step.sequences], result)
        return self._commit_steady(step, result) or self._commit_rows(step, result)

    def _commit_steady(self, step: PlannedStep, result: StepResult) -> CommittedStep | None:
        """The same with fewer operations, for verify blocks that end no request; None for other steps."""
        planned, table, emitted = step.planned, self._table, result.emitted_tokens
        steady = planned.steady
        if steady is None or planned.version != self._request_pool.version:
            return None
        rows, slots = planned.rows, planned.rows.slot_ids
        num_emitted = result.num_accepted + _ONE
        next_lens, accepted = table.context_len[slots] + num_emitted, result.num_accepted.tolist()
        is_ordinary = (
            min(accepted) >= 0
            and max(accepted) <= rows.num_draft_tokens
            and next_lens.tolist() == result.next_context_lens.tolist()
            and not isnan(result.emitted_logprobs.sum())
        )
        if not is_ordinary or (steady.stop_ids is not None and (emitted[:, :, None] == steady.stop_ids).any()):
            return None  # perhaps a stop token, possibly after the last emitted one
        num_tokens = table.num_tokens[slots]
        # Whole rows: the next step overwrites tokens after the last emitted one.
        places = (steady.token_rows + num_tokens)[:, None] + self._columns[: emitted.shape[1]]
        self._flat_tokens[places] = emitted
        table.num_tokens[slots] = num_tokens + num_emitted
        table.context_len[slots] = next_lens
        if (table.flight_step[slots] == step.number).any():  # a row may have missed the step after this one
            table.commit_rows(slots, step.number)
        return CommittedStep(
            step=step,
            result=result,
            num_emitted=num_emitted,
            num_candidates=rows.num_candidates,
            num_accepted=result.num_accepted,
            is_finite=planned.is_emitting,  # all
        )

    def _commit_rows(self, step: PlannedStep, result: StepResult) -> CommittedStep:
        table, plan = self._table, step.plan
        slots = plan.rows.slot_ids
        is_live = table.epoch[slots] == step.planned.epochs
        table.commit_rows(slots[is_live], step.number)
        faults = self._faults(step, result, is_live)
        num_good, is_finite = _num_good(result)
        emits = step.planned.is_emitting & is_live
        if faults:
            emits[list(faults)] = False
        num_remaining = table.num_remaining(slots)
        num_emitted = np.where(emits, np.minimum(num_good, num_remaining), 0)
        num_emitted, is_stopped = self._cut_at_stop(slots, result.emitted_tokens, num_emitted)
        faults |= self._advance_constrained(step, result, emits, num_emitted, is_stopped)
        self._append(slots, result.emitted_tokens, num_emitted)
        advances = is_live.copy()
        advances[list(faults)] = False
        table.exclude_from_cache(slots[is_live & ~is_finite])
        moved = slots[advances]
        self._request_pool.states.commit_rows(moved)
        table.context_len[moved] = np.minimum(result.next_context_lens[advances], table.num_tokens[moved])
        has_bonus = is_finite | is_stopped | (num_emitted == num_remaining)
        num_candidates = np.where(emits & has_bonus, np.minimum(plan.rows.num_candidates, num_remaining - 1), 0)
        committed = CommittedStep(
            step=step,
            result=result,
            num_emitted=num_emitted,
            num_candidates=num_candidates,
            num_accepted=np.clip(result.num_accepted, 0, num_candidates),
            is_finite=is_finite,
        )
        ends = emits & (is_stopped | (num_emitted == num_remaining) | ~is_finite)
        for row in np.flatnonzero(ends).tolist():
            reason: FinishReason = "stop" if is_stopped[row] else "length"
            error = None
            if not has_bonus[row]:
                reason, error = "error", self._non_finite(committed, row, int(num_good[row]))
            self._end(committed, row, reason, error=error)
        for row, fault in faults.items():
            _LOG.error("%s", fault)
            self._end(committed, row, "error", error=fault)
        for row in np.flatnonzero(~is_live).tolist():
            self._append_stale(committed, row, int(num_good[row]))
        return committed

    def events(self, committed: CommittedStep) -> list[TokenEvent]:
        """Events of the step's rows in their order; caches the pages that it filled."""
        self._cache_pages(committed)
        step, endings = committed.step, committed.endings
        counts = committed.num_emitted.tolist()
        tokens = committed.result.emitted_tokens.tolist()
        candidates, accepted = committed.num_candidates.tolist(), committed.num_accepted.tolist()
        is_given = (step.plan.rows.context_lens != CHAINED).tolist()
        starts = _start(committed, slice(None)).tolist()
        logprobs = committed.result.emitted_logprobs.tolist() if step.planned.wants_logprobs else None
        events = []
        for row, sequence in enumerate(step.sequences):
            count, ending = counts[row], endings.get(row)
            if not count and ending is None:
                continue
            request = sequence.request
            wants_logprobs = logprobs is not None and request.sampling.logprobs
            event = TokenEvent(
                request.request_id,
                tuple(tokens[row][:count]),
                tuple(logprobs[row][:count]) if logprobs is not None and wants_logprobs else (),
                starts[row],
                candidates[row],
                accepted[row],
            )
            if request.sampling.top_logprobs:
                event = event._replace(top=_top_of(committed, row, count, request))
            if is_given[row] and candidates[row]:
                event = event._replace(ngram_draft_token_ids=_given_drafts(step.plan.rows, row))
            if request.reports_drafts:
                event = event._replace(draft_token_ids=tuple(committed.result.draft_tokens[row].tolist()))
            if sequence.prompt_logprobs is not None and count:
                event = event._replace(prompt=sequence.prompt_logprobs.delivered())
            if ending is not None:
                event = event._replace(finish_reason=ending.reason, error=ending.error, statistics=ending.statistics)
            events.append(event)
        return events

    # Inside

    def _faults(self, step: PlannedStep, result: StepResult, is_live: Array) -> dict[int, str]:
        """Errors of live rows whose result breaks the step contract."""
        plan, num_accepted = step.plan, result.num_accepted
        next_lens = (
            self._table.context_len[plan.rows.slot_ids] + plan.rows.num_tokens - plan.rows.num_candidates + num_accepted
        )
        is_sound = (
            (num_accepted >= 0) & (num_accepted <= plan.rows.num_candidates) & (result.next_context_lens == next_lens)
        )
        is_sound |= ~is_live
        if is_sound.all():
            return {}
        return {
            row: problem(
                f"request {plan.rows.request_ids[row]!r} step",
                expected="a result that follows the step contract",
                found=f"num_accepted {num_accepted[row]} of {plan.rows.num_candidates[row]} candidates, "
                f"next_context_len {result.next_context_lens[row]}",
                hint="This is a bug of the executor: please report it.",
            )
            for row in np.flatnonzero(~is_sound).tolist()
        }

    def _cut_at_stop(self, slots: Array, emitted: Array, num_emitted: Array) -> tuple[Array, Array]:
        """The counts up to the first stop token, and which rows have one."""
        columns = np.arange(emitted.shape[1])
        is_stop = (emitted[:, :, None] == self._table.stop_ids[slots][:, None, :]).any(2)
        is_stop &= columns < num_emitted[:, None]
        is_stopped = is_stop.any(1)
        return np.where(is_stopped, is_stop.argmax(1) + 1, num_emitted), is_stopped

    def _advance_constrained(
        self, step: PlannedStep, result: StepResult, emits: Array, num_emitted: Array, is_stopped: Array
    ) -> dict[int, str]:
        """Cut the counts where a constraint ends; errors of rows with other tokens, which then emit none."""
        refused = {}
        is_constrained = self._table.is_constrained[step.plan.rows.slot_ids]
        for row in np.flatnonzero(is_constrained & emits).tolist():
            sequence, count, is_last = step.sequences[row], int(num_emitted[row]), bool(is_stopped[row])
            try:
                num_emitted[row], is_stopped[row] = advance(sequence, result, row, count, is_stopped=is_last)
            except ConstraintError as failure:
                refused[row] = refusal(sequence, failure)
                emits[row], num_emitted[row] = False, 0
        return refused

    def _append(self, slots: Array, emitted: Array, num_emitted: Array) -> None:
        table = self._table
        rows, columns = np.nonzero(np.arange(emitted.shape[1]) < num_emitted[:, None])
        table.token_ids[slots[rows], table.num_tokens[slots][rows] + columns] = emitted[rows, columns]
        table.num_tokens[slots] += num_emitted

    def _append_stale(self, committed: CommittedStep, row: int, num_good: int) -> None:
        """A row of a request that was preempted meanwhile: its pages are gone, but its tokens are valid."""
        step = committed.step
        sequence = step.sequences[row]
        if sequence.stale_step is None or sequence.finish_reason is not None:
            return
        if sequence.stale_step == step.number:
            sequence.stale_step = None
        if not step.planned.is_emitting[row]:
            return
        num_remaining = sequence.max_len - len(sequence.token_ids)
        emitted = committed.result.emitted_tokens[row, : min(num_good, num_remaining)].tolist()
        stops = [i for i, token in enumerate(emitted) if token in sequence.request.stop_token_ids]
        emitted, is_stopped = emitted[: stops[0] + 1] if stops else emitted, bool(stops)
        if sequence.matcher is not None:
            try:
                num_emitted, is_stopped = advance(sequence, committed.result, row, len(emitted), is_stopped=is_stopped)
            except ConstraintError as error:
                self._end(committed, row, "error", error=refusal(sequence, error))
                return
            emitted = emitted[:num_emitted]
        sequence.token_ids += emitted
        committed.num_emitted[row] = len(emitted)
        has_bonus = bool(committed.is_finite[row] or is_stopped or len(emitted) == num_remaining)
        if has_bonus:
            committed.num_candidates[row] = min(step.plan.rows.num_candidates[row], num_remaining - 1)
            committed.num_accepted[row] = min(committed.result.num_accepted[row], committed.num_candidates[row])
        if not has_bonus:
            self._end(committed, row, "error", error=self._non_finite(committed, row, num_good))
        elif is_stopped or len(emitted) == num_remaining:
            self._end(committed, row, "stop" if is_stopped else "length")

    def _end(self, committed: CommittedStep, row: int, reason: FinishReason, *, error: str | None = None) -> None:
        sequence = committed.step.sequences[row]
        slot = sequence.slot
        if slot is not None and self._table.context_len[slot] >= self._table.fills_page_at[slot]:
            self._request_pool.cache_full_pages(sequence)
        sequence.finish_reason = reason
        self._request_pool.remove(sequence)
        self._num_finished[reason] += 1
        committed.endings[row] = Ending(reason=reason, statistics=sequence.statistics(), error=error)

    def _cache_pages(self, committed: CommittedStep) -> None:
        """Cache the pages that these rows filled."""
        table, step = self._table, committed.step
        slots = step.plan.rows.slot_ids
        has_filled = table.context_len[slots] >= table.fills_page_at[slots]
        if not has_filled.any():
            return
        is_live = table.epoch[slots] == step.planned.epochs
        for row in np.flatnonzero(has_filled & is_live).tolist():
            self._request_pool.cache_full_pages(step.sequences[row])

    def _non_finite(self, committed: CommittedStep, row: int, num_good: int) -> str:
        plan = committed.step.plan
        position = _start(committed, row) + plan.rows.num_tokens[row] - plan.rows.num_candidates[row] + num_good - 1
        return problem(
            "target",
            expected="finite logits",
            found=f"NaN or infinity: the logits are not finite at position {position}",
            hint="Check the weights and the dtype of the engine: bfloat16 models may overflow in float16.",
        )


class StepCounts:
    """Running counts of committed steps."""

    def __init__(self, max_draft_len: int) -> None:
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_steps = 0
        self.num_steps_by_draft_length: Counter[int] = Counter()
        self.num_computed_tokens = 0
        self.num_ngram_draft_tokens = 0
        self.num_ngram_accepted_tokens = 0
        self._width = max_draft_len + 1
        self._num_blocks = np.zeros(self._width**2, np.int64)  # by candidates and accepted drafts

    def add(self, committed: CommittedStep) -> None:
        """Count a committed step."""
        rows = committed.step.plan.rows
        self.num_steps += 1
        self.num_steps_by_draft_length[rows.num_draft_tokens] += 1
        self.num_computed_tokens += rows.total_tokens
        is_given = rows.context_lens != CHAINED  # with drafts: the host's
        self.num_ngram_draft_tokens += int(committed.num_candidates[is_given].sum())
        self.num_ngram_accepted_tokens += int(committed.num_accepted[is_given].sum())
        outcomes = committed.num_candidates * self._width + committed.num_accepted
        self._num_blocks += np.bincount(outcomes, minlength=len(self._num_blocks))

    @property
    def blocks(self) -> Array:
        """Verify blocks by candidates [1 ..] and accepted drafts [0 ..]."""
        blocks: Array = self._num_blocks.reshape(self._width, self._width)[1:]
        return blocks


def _given_drafts(rows: StepRows, row: int) -> tuple[int, ...]:
    end = int(rows.token_offsets[row + 1])
    return tuple(rows.token_ids[end - int(rows.num_candidates[row]) : end].tolist())


def _top_of(committed: CommittedStep, row: int, count: int, request: Request) -> TopTokens:
    top = committed.result.top
    assert top is not None, "the step was to give the most likely tokens"
    return top[row, :count, : request.sampling.top_logprobs]


def _num_good(result: StepResult) -> tuple[Array, Array]:
    """Emitted tokens per row before the first invalid logits (`step_spec`), and whether all were valid."""
    num_valid = result.num_accepted.astype(np.int64) + 1
    is_nan = np.isnan(result.emitted_logprobs)
    if is_nan.any():
        is_nan &= np.arange(is_nan.shape[1]) < num_valid[:, None]
        has_nan = is_nan.any(1)
        is_finite: Array = np.logical_not(has_nan)
        return np.where(has_nan, is_nan.argmax(1), num_valid), is_finite
    return num_valid, np.ones(len(num_valid), bool)


def _start(committed: CommittedStep, rows: int | slice) -> Array:
    """Context length at the first token of rows."""
    plan, result = committed.step.plan, committed.result
    num_kept = plan.rows.num_tokens[rows] - plan.rows.num_candidates[rows] + result.num_accepted[rows]
    start: Array = result.next_context_lens[rows] - num_kept
    return start
