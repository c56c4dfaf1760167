"""An executor without a model: a toy target whose next token depends on all tokens before it.

K/V are stored by page and offset, so a wrong page, position or context length changes the tokens. Draft K/V are
separate, so a request whose draft context was lost drafts wrong tokens. Drafts are right or wrong on command. No torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.batch import RequestResult, ScheduledRequest, SlotMirror, StepBatch, StepSampling, WindowColumns
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.step_plan import (
    SNAPSHOTS,
    ExecutorLimits,
    FinishedStep,
    JointRows,
    StepPlan,
    StepResult,
    TokenMasks,
)

# (seed, position) -> True if that draft is right.
DraftRule = Callable[[int, int], bool]

_Slot = tuple[int, int]  # page id, offset


def result_of(rows: tuple[RequestResult, ...], *, num_draft_tokens: int) -> StepResult:
    """The arrays of such rows."""
    width = num_draft_tokens + 1
    emitted, logprobs = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for r, row in enumerate(rows):
        emitted[r, : len(row.emitted_tokens)] = row.emitted_tokens
        logprobs[r, : len(row.logprobs)] = row.logprobs
        if row.non_finite_position is not None:
            logprobs[r, row.num_accepted] = np.nan
    drafts = [row.draft_tokens or (0,) * num_draft_tokens for row in rows]
    return StepResult(
        emitted_tokens=emitted,
        emitted_logprobs=logprobs,
        num_accepted=np.array([row.num_accepted for row in rows], np.int32),
        next_context_lens=np.array([row.next_context_len for row in rows], np.int32),
        draft_tokens=np.array(drafts, np.int32).reshape(len(rows), num_draft_tokens),
    )


def always_right(seed: int, position: int) -> bool:
    return True


def always_wrong(seed: int, position: int) -> bool:
    return False


def right_with_probability(probability: float) -> DraftRule:
    """Each draft is right with this probability, decided by a hash of seed and position."""

    def rule(seed: int, position: int) -> bool:
        return _mix(seed, position, 0xD4AF7) % 1_000_003 < probability * 1_000_003

    return rule


class ToyTarget:
    """next token = hash of all tokens before it, and of the seed when temperature > 0.

    With logit rules, it is also a hash of the rules and of the tokens that the device knows of the request.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def key_value(self, history: int, token: int) -> int:
        """K/V of a token, which depend on all tokens before it."""
        return _mix(history, token)

    def next_token(self, history: int, position: int, sampling: StepSampling, rules: int = 0) -> int:
        """The token at `position`, given the folded K/V of all tokens before it, and of `fold_rules`."""
        salt = 0 if sampling.temperature == 0.0 else 1 + sampling.seed
        return _mix(history, position, salt + rules) % self.vocab_size

    def generate(
        self,
        prompt: Iterable[int],
        num_tokens: int,
        sampling: StepSampling | None = None,
        logit_rules: LogitRules | None = None,
    ) -> list[int]:
        """Reference output for a prompt, generated one token at a time without pages."""
        sampling = sampling or StepSampling()
        history, known = 0, list(prompt)
        for token in known:
            history = fold(history, self.key_value(history, token))
        emitted: list[int] = []
        while len(emitted) < num_tokens:
            emitted.append(self.next_token(history, len(known), sampling, fold_rules(logit_rules, known)))
            known.append(emitted[-1])
            history = fold(history, self.key_value(history, emitted[-1]))
        return emitted


def fold(history: int, key_value: int) -> int:
    """The state after one more position of context."""
    return _mix(history, key_value, 7)


def fold_rules(rules: LogitRules | None, known: Iterable[int]) -> int:
    """Hash of a request's rules and the tokens before a row; 0 without rules."""
    if rules is None:
        return 0
    return _mix(1, rules.num_prompt_tokens, int(1000 * rules.repetition_penalty), *known)


class ToyStates:
    """Recurrent states by slot and snapshot: the folded tokens after each position where a row may begin.

    Those are all positions of a row of at most `num_records` tokens, and the end of a longer one.
    """

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._slots: dict[int, dict[int, int]] = {}
        self.snapshots: dict[int, dict[int, int]] = {}
        self._plan: StepPlan | None = None
        self._left: dict[int, dict[int, int]] = {}  # by the running step

    def begin(self, plan: StepPlan) -> None:
        """Fill slots from snapshots."""
        self._plan, self._left = plan, {}
        for slot, snapshot_id in zip(plan.restores.slots.tolist(), plan.restores.snapshots.tolist(), strict=True):
            self._slots[slot] = self.snapshots.get(snapshot_id, {})

    def history(self, row: int, context_len: int, of_pages: int) -> int:
        """The folded tokens before a row: a wrong state spoils what its pages say."""
        of_slot = self._slots.get(self._slot(row), {}).get(context_len, -1) if context_len else 0
        return of_pages if of_slot == of_pages else _mix(of_pages, of_slot)

    def leave(self, row: int, context_len: int, histories: list[int]) -> None:
        is_short = len(histories) - 1 <= self._num_records
        first = 0 if is_short else len(histories) - 1
        self._left[self._slot(row)] = {context_len + i: histories[i] for i in range(first, len(histories))}

    def end(self, plan: StepPlan) -> None:
        """Store what the rows of a step that succeeded leave, and the snapshots."""
        self._slots |= self._left
        for slot, snapshot_id in zip(plan.saves.slots.tolist(), plan.saves.snapshots.tolist(), strict=True):
            self.snapshots[snapshot_id] = self._slots[slot]

    def _slot(self, row: int) -> int:
        assert self._plan is not None
        return int(self._plan.rows.slot_ids[row])


class ToyWindows:
    """K/V of layers that read a window, each group in pages of its own."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._page_size = limits.page_size
        self._groups = limits.page_windows
        self.key_values: list[dict[_Slot, int]] = [{} for _ in self._groups]

    def write(self, row: ScheduledRequest, position: int, key_value: int) -> None:
        for key_values, pages in zip(self.key_values, row.window_pages, strict=True):
            key_values[self._slot(pages, position)] = key_value

    def are_wrong(self, row: ScheduledRequest, position: int, key_value_at: Callable[[int], int]) -> bool:
        """True if a window before `position` does not hold what was written there."""
        for group, key_values, pages in zip(self._groups, self.key_values, row.window_pages, strict=True):
            for key in range(max(0, position - group.window + 1), position):
                if key_values.get(self._slot(pages, key)) != key_value_at(key):
                    return True
        return False

    def check(self, rows: Iterable[ScheduledRequest]) -> None:
        """Assert that pages are where they may be, and that no row reads or writes what another one writes."""
        written: set[tuple[int, _Slot]] = set()
        read: set[tuple[int, _Slot]] = set()
        for row in rows:
            for g, (group, pages) in enumerate(zip(self._groups, row.window_pages, strict=True)):
                assert len(set(pages.page_ids)) == len(pages.page_ids), "a page appears twice"
                assert all(0 <= page_id < group.num_pages for page_id in pages.page_ids), "no such page"
                end = row.context_len + len(row.token_ids)
                own = {(g, self._slot(pages, position)) for position in range(row.context_len, end)}
                assert not own & written, f"{row.request_id} writes where another row of the step writes"
                written |= own
                first = max(0, row.context_len - group.window + 1)
                read |= {(g, self._slot(pages, position)) for position in range(first, row.context_len)}
        assert not read & written, "a row writes what a row of the same step reads"

    def _slot(self, pages: WindowColumns, position: int) -> _Slot:
        index = position // self._page_size - pages.first
        assert index >= 0, "a page from before the window"
        return pages.page_ids[index], position % self._page_size


Content = dict[tuple[int, int], Any]  # of a place: by page group and pool


class ToyHost:
    """The host's tier: K/V by place, page group and offset, of target and drafter, and snapshots by place."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self._limits = limits
        self._pages: dict[tuple[int, int, int], list[int | None]] = {}  # by place, group and pool
        self._snapshots: dict[int, dict[int, int]] = {}

    def copy(self, plan: StepPlan, pools: list[list[dict[_Slot, int]]], snapshots: dict[int, dict[int, int]]) -> None:
        """`pools` has K/V by page and offset, of each group."""
        for run in plan.page_copies.runs():
            for page_id, host_id in zip(run.ids.tolist(), run.host_ids.tolist(), strict=True):
                if run.group == SNAPSHOTS:
                    assert host_id < self._limits.num_host_snapshots
                    if run.is_onboard:
                        snapshots[page_id] = self._snapshots[host_id]
                    else:
                        self._snapshots[host_id] = snapshots[page_id]
                    continue
                assert host_id < self._limits.num_host_pages
                for index, key_values in enumerate(pools[run.group]):
                    self._copy_page(key_values, page_id, (host_id, run.group, index), is_onboard=run.is_onboard)

    def content(self, place: int, *, is_state: bool, groups: int = -1) -> Content:
        """What a place holds, of these groups: bits."""
        if is_state:
            return {(-1, 0): dict(self._snapshots[place])}
        held = {key[1:]: list(rows) for key, rows in self._pages.items() if key[0] == place and groups >> key[1] & 1}
        return dict(sorted(held.items()))

    def write(self, place: int, content: Content, *, is_state: bool) -> None:
        """Instead of what it holds."""
        if is_state:
            self._snapshots[place] = dict(content[-1, 0])
            return
        for key in [key for key in self._pages if key[0] == place]:
            del self._pages[key]
        for (group, index), rows in content.items():
            self._pages[place, group, index] = list(rows)

    def _copy_page(
        self, key_values: dict[_Slot, int], page_id: int, place: tuple[int, int, int], *, is_onboard: bool
    ) -> None:
        if not is_onboard:
            self._pages[place] = [key_values.get((page_id, offset)) for offset in range(self._limits.page_size)]
            return
        for offset, key_value in enumerate(self._pages[place]):
            key_values.pop((page_id, offset), None)
            if key_value is not None:
                key_values[page_id, offset] = key_value


class FakeExecutor:
    """Implements StepExecutor over a ToyTarget.

    Asserts that every batch keeps the limits and the contract. A batch for which `fails_on` returns True raises;
    `batches` records all batches, every row written out.
    """

    has_queue = False
    can_retry = True

    def __init__(
        self,
        limits: ExecutorLimits,
        *,
        vocab_size: int = 997,
        draft_rule: DraftRule = always_right,
        fails_on: Callable[[StepBatch], bool] | None = None,
    ) -> None:
        self._limits = limits
        self.target = ToyTarget(vocab_size)
        self.draft_rule = draft_rule
        self.fails_on = fails_on
        self.batches: list[StepBatch] = []
        self._target_kv: dict[_Slot, int] = {}
        self._draft_kv: dict[_Slot, int] = {}
        windows = [group.window for group in limits.page_windows]
        self._slots = SlotMirror(limits.max_positions, windows=windows, max_pages=limits.max_pages)
        self._windows = ToyWindows(limits)
        self._states = None if limits.num_snapshots is None else ToyStates(limits.max_draft_len + 1)
        self.host = ToyHost(limits)
        self._allowed: dict[int, Array] = {}  # tokens by row of logits, of the running step

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run every row; raises RuntimeError if `fails_on` the batch, after writing some K/V."""
        entries = list(zip(plan.page_updates.slots.tolist(), plan.page_updates.columns.tolist(), strict=True))
        assert len(set(entries)) == len(entries), "an entry is updated twice, of which a GPU keeps either"
        return FinishedStep(lambda: self._step(plan))

    def _step(self, plan: StepPlan) -> StepResult:
        if not plan.rows.num_requests:
            assert len(plan.page_copies), "nothing to do"
            self._copy_pages(plan)
            return StepResult.of_no_rows()
        batch = self._slots.assemble(plan, page_size=self._limits.page_size)
        self.batches.append(batch)
        self._check(batch)
        self._copy_pages(plan)
        assert plan.num_pages >= max(len(row.page_ids) for row in batch.requests), "a row has more pages than num_pages"
        if self._states is not None:
            self._states.begin(plan)
        self._allowed = {} if plan.masks is None else _allowed_tokens(plan.masks, self.target.vocab_size)
        results = self.run_rows(batch)
        if self.fails_on is not None and self.fails_on(batch):
            raise RuntimeError("the device failed on command")
        self._slots.store(plan, results)
        if self._states is not None:
            self._states.end(plan)
        return result_of(results, num_draft_tokens=plan.rows.num_draft_tokens)

    def _copy_pages(self, plan: StepPlan) -> None:
        pools = [[self._target_kv, self._draft_kv], *([key_values] for key_values in self._windows.key_values)]
        self.host.copy(plan, pools, self._states.snapshots if self._states is not None else {})

    def run_rows(self, batch: StepBatch) -> tuple[RequestResult, ...]:
        width = batch.num_draft_tokens + 1
        return tuple(self._run(row, r * width, batch.num_draft_tokens) for r, row in enumerate(batch.requests))

    def _run(self, row: ScheduledRequest, first_logits: int, num_draft_tokens: int) -> RequestResult:
        first = len(row.token_ids) - row.num_candidates - 1  # the row whose sample is compared with the first draft
        history = self._read(self._target_kv, row, row.context_len)
        if self._states is not None:
            history = self._states.history(first_logits // (num_draft_tokens + 1), row.context_len, history)
        histories = [history]
        sampled: list[int] = []  # the target's token after each row
        for index, token in enumerate(row.token_ids):
            position = row.context_len + index
            key_value = self.target.key_value(history, token)
            if self._windows.are_wrong(row, position, lambda key: self._target_kv.get(self._slot(row, key), 0)):
                history = _mix(history, position)
            self._target_kv[self._slot(row, position)] = key_value
            self._windows.write(row, position, key_value)
            history = fold(history, key_value)
            histories.append(history)
            rules = fold_rules(row.logit_rules, (*row.known_tokens, *row.token_ids[: index + 1]))
            sampled.append(self.target.next_token(history, position + 1, row.sampling, rules))
            if index >= first and (allowed := self._allowed.get(first_logits + index - first)) is not None:
                sampled[-1] = next_allowed(sampled[-1], allowed)
        if self._states is not None:
            self._states.leave(first_logits // (num_draft_tokens + 1), row.context_len, histories)
        candidates = row.token_ids[first + 1 :]
        num_accepted = 0
        while num_accepted < len(candidates) and candidates[num_accepted] == sampled[first + num_accepted]:
            num_accepted += 1
        emitted = (*candidates[:num_accepted], sampled[first + num_accepted])
        next_context_len = row.context_len + first + 1 + num_accepted
        return RequestResult(
            emitted_tokens=emitted,
            logprobs=tuple(-1.0 / (1 + token) for token in emitted),
            num_accepted=num_accepted,
            draft_tokens=self._draft(row, next_context_len, emitted, num_draft_tokens),
            next_context_len=next_context_len,
        )

    def _draft(
        self, row: ScheduledRequest, next_context_len: int, emitted: tuple[int, ...], num_draft_tokens: int
    ) -> tuple[int, ...]:
        """Add the accepted rows to the draft context and draft from it.

        Drafts are right only if it is complete.
        """
        for position in range(row.context_len, next_context_len):
            slot = self._slot(row, position)
            self._draft_kv[slot] = self._target_kv[slot]
        history = self._read(self._draft_kv, row, next_context_len)
        history = fold(history, self.target.key_value(history, emitted[-1]))
        known = [*row.known_tokens, *row.token_ids][:next_context_len]
        known.append(emitted[-1])
        drafts: list[int] = []
        for position in range(next_context_len + 1, next_context_len + 1 + num_draft_tokens):
            right = self.target.next_token(
                history, position, row.sampling, fold_rules(row.logit_rules, [*known, *drafts])
            )
            is_right = self.draft_rule(row.sampling.seed, position)
            drafts.append(right if is_right else (right + 1) % self.target.vocab_size)
            history = fold(history, self.target.key_value(history, drafts[-1]))
        return tuple(drafts)

    def _read(self, key_values: dict[_Slot, int], row: ScheduledRequest, context_len: int) -> int:
        history = 0
        for position in range(context_len):
            history = fold(history, key_values.get(self._slot(row, position), 0))
        return history

    def _slot(self, row: ScheduledRequest, position: int) -> _Slot:
        page_size = self._limits.page_size
        return row.page_ids[position // page_size], position % page_size

    def _check(self, batch: StepBatch) -> None:
        limits = self._limits
        assert batch.requests, "an empty batch is not to be run"
        assert len(batch.requests) <= limits.max_batch_size, "more requests than max_batch_size"
        assert batch.num_tokens <= limits.max_num_tokens, "more tokens than max_num_tokens"
        assert 0 <= batch.num_draft_tokens <= limits.max_draft_len, "K is beyond max_draft_len"
        request_ids = [row.request_id for row in batch.requests]
        assert len(set(request_ids)) == len(request_ids), "a request has two rows"
        self._windows.check(batch.requests)
        written: set[_Slot] = set()
        for row in batch.requests:
            self._check_row(row, batch.num_draft_tokens)
            slots = {self._slot(row, row.context_len + index) for index in range(len(row.token_ids))}
            assert not slots & written, f"{row.request_id} writes where another row of the step writes"
            written |= slots
        read = {self._slot(row, position) for row in batch.requests for position in range(row.context_len)}
        assert not read & written, "a row writes what a row of the same step reads"

    def _check_row(self, row: ScheduledRequest, num_draft_tokens: int) -> None:
        limits = self._limits
        end = row.context_len + len(row.token_ids)
        assert row.token_ids and row.context_len >= 0
        assert 0 <= row.num_candidates <= min(num_draft_tokens, len(row.token_ids) - 1), "more candidates than K"
        assert row.num_candidates in (0, len(row.token_ids) - 1), "a prompt chunk carries no drafts"
        assert end <= limits.max_positions, f"position {end - 1} is beyond max_positions"
        assert len(set(row.page_ids)) == len(row.page_ids), "a page appears twice"
        assert all(0 <= page_id < limits.num_pages for page_id in row.page_ids), "no such page"
        assert all(0 <= token < self.target.vocab_size for token in row.token_ids), "no such token"


class FakeRanks:
    """Implements StepExecutor for ranks with requests of their own: a FakeExecutor each, run together."""

    has_queue = False
    can_retry = False

    def __init__(self, executors: list[FakeExecutor]) -> None:
        self.executors = executors
        self.limits, self.target = executors[0].limits, executors[0].target

    def submit(self, plan: StepPlan) -> FinishedStep:
        plans = (plan, *plan.others)
        joint = JointRows.of(plans)
        assert all(each.joint == joint for each in plans), "a rank expects other rows than there are"
        assert len({each.rows.num_draft_tokens for each in plans}) == 1, "ranks have different K"
        parts = [
            executor.submit(each).result()
            if each.rows.num_requests or len(each.page_copies)
            else StepResult.of_no_rows()
            for executor, each in zip(self.executors, plans, strict=True)
        ]
        return FinishedStep(lambda: replace(parts[0], others=tuple(parts[1:])))


def next_allowed(token: int, allowed: Array) -> int:
    """The first of the sorted `allowed` tokens from `token` on, or of all."""
    found: int = allowed[np.searchsorted(allowed, token) % len(allowed)]
    return int(found)


def _allowed_tokens(masks: TokenMasks, vocab_size: int) -> dict[int, Array]:
    is_allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return {row: np.flatnonzero(bits) for row, bits in zip(masks.rows.tolist(), is_allowed, strict=True)}


def _mix(*values: int) -> int:
    """Hash small integers, equally in every process."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
    return state
