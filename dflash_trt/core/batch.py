"""Steps written out row by row, each with all its tokens and pages: for measuring, checking and tests.

An engine that serves uses the arrays of `step_plan`; `SlotMirror` translates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan

import numpy as np

from dflash_trt.core.logit_rules import LogitRules, RuledSlots, SlotUpdate
from dflash_trt.core.sampling import STEP_SAMPLING_FIELDS
from dflash_trt.core.sampling import StepSampling as StepSampling
from dflash_trt.core.step_plan import CHAINED, PageUpdates, StepExecutor, StepPlan, StepResult, StepRows


@dataclass(frozen=True, slots=True)
class WindowColumns:
    """Pages of a request in a page group with a window: those from index `first` on."""

    first: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """The tokens that one request computes in a step.

    A verify block is `[anchor, draft_1 .. draft_num_candidates]`; a prefill chunk has num_candidates 0 and any length.
    `page_ids` covers positions 0 .. context_len + len(token_ids) - 1; in groups with a window, `window_pages` cover the
    positions that are read.
    """

    request_id: str
    token_ids: tuple[int, ...]
    context_len: int  # tokens whose K/V are committed == position of token_ids[0]
    num_candidates: int
    page_ids: tuple[int, ...]
    sampling: StepSampling
    logit_rules: LogitRules | None = None
    known_tokens: tuple[int, ...] = ()  # with rules: before token_ids, by position
    window_pages: tuple[WindowColumns, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The requests of a step, and its K: drafts made, and the maximum of drafts verified, per request."""

    requests: tuple[ScheduledRequest, ...]
    num_draft_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestResult:
    """One request's result. `emitted_tokens` are the num_accepted accepted drafts, then the bonus.

    If the target's logits gave no token, `non_finite_position` is the position before it, and the bonus is missing.
    """

    emitted_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # log probability of each emitted token, under the target's unfiltered distribution
    num_accepted: int
    draft_tokens: tuple[int, ...]  # num_draft_tokens of them, for the next step
    next_context_len: int
    non_finite_position: int | None = None


def plan_of(batch: StepBatch, *, max_pages: int = 0) -> StepPlan:
    """The plan for these rows, row r in slot r with all its pages and rules.

    Window pages need `max_pages`.
    """
    rows = batch.requests
    counts = [len(row.page_ids) for row in rows]
    entries = [entry for slot, row in enumerate(rows) for entry in _table_entries(slot, row, max_pages)]
    slots, columns, page_ids = (_integers(list(column)) for column in zip(*entries, strict=True)) if entries else _NONE
    step_rows = StepRows(
        request_ids=tuple(row.request_id for row in rows),
        slot_ids=np.arange(len(rows)),
        num_tokens=_integers([len(row.token_ids) for row in rows]),
        num_candidates=_integers([row.num_candidates for row in rows]),
        context_lens=_integers([row.context_len for row in rows]),
        token_ids=_integers([token for row in rows for token in row.token_ids]),
        sampling={
            field.name: np.array([getattr(row.sampling, field.name) for row in rows]) for field in STEP_SAMPLING_FIELDS
        },
        num_draft_tokens=batch.num_draft_tokens,
    )
    updates = PageUpdates(slots=slots, columns=columns, page_ids=page_ids)
    slot_updates = tuple(
        SlotUpdate(slot=slot, rules=row.logit_rules, token_ids=_integers(list(row.known_tokens)))
        for slot, row in enumerate(rows)
    )
    return StepPlan(step_rows, max(counts, default=1), updates, slot_updates)


def _table_entries(slot: int, row: ScheduledRequest, max_pages: int) -> Iterator[tuple[int, int, int]]:
    groups = (WindowColumns(0, row.page_ids), *row.window_pages)
    for group, pages in enumerate(groups):
        for index, page_id in enumerate(pages.page_ids):
            yield slot, group * max_pages + pages.first + index, page_id


def chained(plan: StepPlan) -> StepPlan:
    """The same layout, with every row filled from its slot, which the step before has stored."""
    rows = plan.rows
    chained_lens, no_tokens = np.full_like(rows.context_lens, CHAINED), np.zeros_like(rows.token_ids)
    return replace(plan, rows=replace(rows, context_lens=chained_lens, token_ids=no_tokens))


def run_batch(executor: StepExecutor, batch: StepBatch) -> tuple[RequestResult, ...]:
    """Run one step and wait for it; results in row order. Overwrites the slots of running requests."""
    return request_results(executor.submit(plan_of(batch, max_pages=executor.limits.max_pages)).result())


def request_results(result: StepResult) -> tuple[RequestResult, ...]:
    """The rows of a result, up to the first logits that gave no token."""
    columns = (result.emitted_tokens, result.emitted_logprobs, result.num_accepted, result.next_context_lens)
    drafts = result.draft_tokens.tolist()
    return tuple(
        _up_to_non_finite(
            RequestResult(
                emitted_tokens=tuple(emitted[: num_accepted + 1]),
                logprobs=tuple(logprobs[: num_accepted + 1]),
                num_accepted=num_accepted,
                draft_tokens=tuple(row_drafts),
                next_context_len=next_context_len,
            )
        )
        for emitted, logprobs, num_accepted, next_context_len, row_drafts in zip(
            *(column.tolist() for column in columns), drafts, strict=True
        )
    )


class SlotMirror:
    """The slots of a device on the host, for executors that take their rows written out."""

    def __init__(self, max_positions: int, *, windows: Sequence[int] = (), max_pages: int = 0) -> None:
        """`windows` and `max_pages` are from the limits of an executor whose pages are in several groups."""
        self._windows, self._max_pages = windows, max_pages
        self._ruled_slots = RuledSlots(max_positions)
        self._pages: dict[int, dict[int, int]] = {}  # page ids by slot and column
        self._tokens: dict[int, tuple[int, ...]] = {}  # bonus and drafts
        self._context_lens: dict[int, int] = {}

    def assemble(self, plan: StepPlan, *, page_size: int) -> StepBatch:
        """The plan with every row written out."""
        updates = plan.page_updates
        for slot, column, page_id in zip(updates.slots, updates.columns, updates.page_ids, strict=True):
            self._pages.setdefault(int(slot), {})[int(column)] = int(page_id)
        rows = [self._row(plan, r, page_size) for r in range(plan.rows.num_requests)]
        self._ruled_slots.update(plan.slot_updates)
        for r, rules, tokens in self._ruled_slots.rows(plan.rows.slot_ids):
            start, token_ids = rows[r].context_len, rows[r].token_ids
            tokens[start : start + len(token_ids)] = token_ids
            rows[r] = replace(rows[r], logit_rules=rules, known_tokens=tuple(tokens[:start].tolist()))
        return StepBatch(requests=tuple(rows), num_draft_tokens=plan.rows.num_draft_tokens)

    def store(self, plan: StepPlan, rows: tuple[RequestResult, ...]) -> None:
        """The last part of a step."""
        for slot, row in zip(plan.rows.slot_ids.tolist(), rows, strict=True):
            has_bonus = row.non_finite_position is None
            tokens = (
                (*row.emitted_tokens[-1:], *row.draft_tokens) if has_bonus else (0,) * (plan.rows.num_draft_tokens + 1)
            )
            self._tokens[slot] = tokens
            self._context_lens[slot] = row.next_context_len

    def _row(self, plan: StepPlan, r: int, page_size: int) -> ScheduledRequest:
        slot, num_tokens, context_len = (
            int(plan.rows.slot_ids[r]),
            int(plan.rows.num_tokens[r]),
            int(plan.rows.context_lens[r]),
        )
        start = plan.rows.token_offsets[r]
        token_ids = tuple(plan.rows.token_ids[start : start + num_tokens].tolist())
        if context_len == CHAINED:
            token_ids, context_len = self._tokens[slot][:num_tokens], self._context_lens[slot]
            assert len(token_ids) == num_tokens, "a chained row has as many drafts as its slot"
        pages = self._pages.get(slot, {})
        num_pages = -(-(context_len + num_tokens) // page_size)
        assert all(column in pages for column in range(num_pages)), "the pages do not cover the step"
        return ScheduledRequest(
            request_id=plan.rows.request_ids[r],
            token_ids=token_ids,
            context_len=context_len,
            num_candidates=int(plan.rows.num_candidates[r]),
            page_ids=tuple(pages[column] for column in range(num_pages)),
            sampling=StepSampling(**{name: column[r].item() for name, column in plan.rows.sampling.items()}),
            window_pages=tuple(
                self._window_pages(pages, group, range(max(0, context_len - window + 1) // page_size, num_pages))
                for group, window in enumerate(self._windows, start=1)
            ),
        )

    def _window_pages(self, pages: dict[int, int], group: int, indices: range) -> WindowColumns:
        first_column = group * self._max_pages
        assert all(first_column + i in pages for i in indices), "the pages of a window do not cover the step"
        return WindowColumns(indices.start, tuple(pages[first_column + i] for i in indices))


_NONE = (np.zeros(0, np.int64),) * 3


def _integers(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)


def _up_to_non_finite(result: RequestResult) -> RequestResult:
    """Translate the NaN of the step contract: keep the tokens before the first row without a valid token."""
    num_good = next((i for i, logprob in enumerate(result.logprobs) if isnan(logprob)), None)
    if num_good is None:
        return result
    next_context_len = result.next_context_len - result.num_accepted + num_good
    return RequestResult(
        emitted_tokens=result.emitted_tokens[:num_good],
        logprobs=result.logprobs[:num_good],
        num_accepted=num_good,
        draft_tokens=(),
        next_context_len=next_context_len,
        non_finite_position=next_context_len - 1,
    )
