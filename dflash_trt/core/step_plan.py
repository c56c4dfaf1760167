"""The scheduler's plan of a step, and the executor's result: arrays, with a row per request.

A running request has a slot: its place on the device, which keeps its last bonus token and drafts, its context length
and its row of the page table. A chained row is filled on the device from its slot, so a step can be submitted before
the results of the previous step are read. Other rows are given by the host: chunks of prompts. numpy only, so that the
scheduler needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.logprobs import LOGPROBS_ROWS, PromptRows, PromptScores, TopRows, TopTokens

if TYPE_CHECKING:
    from dflash_trt.core.logit_rules import SlotUpdate


@dataclass(frozen=True, slots=True)
class PageWindow:
    """A group of layers with pages of their own, `num_pages` of them.

    A row at position p reads positions from p - window + 1 on, so a request keeps the pages of these only. Kernels read
    keys in blocks, and may load pages before a window without using them: entries of the page table there name
    `blank_page`, one page more, which stays as it is allocated, zeros. A weight of 0 would not hide the NaN of another
    request.
    """

    window: int
    num_pages: int

    @property
    def blank_page(self) -> int:
        return self.num_pages


MAX_KEY_BLOCK: Final = 128  # keys that a kernel loads together


def num_pages_for(num_positions: int, page_size: int) -> int:
    """Pages that hold `num_positions` positions from the first on."""
    return -(-num_positions // page_size)


def decode_pages(window: int, page_size: int, max_draft_len: int) -> int:
    """Most pages of a decoding request: a window, and the verify blocks of two uncommitted steps."""
    num_positions = window - 1 + 2 * (max_draft_len + 1)
    return (num_positions + page_size - 2) // page_size + 1


CHAINED: Final = -1  # as a row's context length: the slot has it
SNAPSHOTS: Final = -1  # in place of a page group


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorLimits:
    """Limits for the scheduler. `max_draft_len` and `draft_topk` are 0 for an engine without a drafter.

    `draft_topk` is C of `core/step_spec.py`, per draft. `num_pages` counts the first group of layers, which keeps all
    positions; `page_windows` are the other groups.

    A target with recurrent layers shares prefixes through `num_snapshots` copies of slots; 0 shares none.

    `num_host_pages` and `num_host_snapshots` are places in the host's tier, for prefixes that leave the device.

    `has_draft_confidence`: steps that draft give `StepResult.draft_confidence`.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    page_size: int  # token positions per page
    num_pages: int
    draft_topk: int = 0
    num_snapshots: int | None = None  # recurrent states; None means that a prefix is its pages only
    page_windows: tuple[PageWindow, ...] = ()
    has_draft_confidence: bool = False
    max_prompt_scores: int | None = None  # prompt tokens whose log probabilities a step gives; None: of all
    num_host_pages: int = 0  # each with a page of every group
    num_host_snapshots: int = 0

    @property
    def max_positions(self) -> int:
        """Positions that a row may reach: chained after a row that ends its request, it may pass max_seq_len."""
        return self.max_seq_len + self.max_draft_len

    @property
    def max_pages(self) -> int:
        """Pages of one request in one group."""
        return num_pages_for(self.max_positions, self.page_size)

    @property
    def num_page_groups(self) -> int:
        return 1 + len(self.page_windows)

    @property
    def table_width(self) -> int:
        """Entries of a request in the page table: `max_pages` per group, concatenated."""
        return self.num_page_groups * self.max_pages


@dataclass(frozen=True, kw_only=True, eq=False)
class PageUpdates:
    """Entries of the page table that change before a step, int64 [D]: `page_ids` at [slots, columns].

    Page i of a request in page group g is in column g * max_pages + i.
    """

    slots: Array
    columns: Array
    page_ids: Array


@dataclass(frozen=True, eq=False)
class StateCopies:
    """Recurrent states that are copied between slots and snapshots, int64 [C] each."""

    slots: Array
    snapshots: Array

    def of_slots(self, slot_ids: Array) -> StateCopies:
        """Those of some slots."""
        is_in = np.isin(self.slots, slot_ids)
        return StateCopies(self.slots[is_in], self.snapshots[is_in])


NO_COPIES: Final = StateCopies(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRun:
    """Copies of one kind, no two of which write to the same place."""

    is_onboard: bool
    group: int
    ids: Array
    host_ids: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class PageCopies:
    """Copies between the device and the host's tier, int64 [C]: made before a step, in this order.

    A copy is of page `ids[i]` of page group `groups[i]`, or of a snapshot where that is SNAPSHOTS. It goes to place
    `host_ids[i]`, or comes from there if `is_onboard[i]`.
    """

    is_onboard: Array  # bool
    groups: Array
    ids: Array
    host_ids: Array

    def __len__(self) -> int:
        return len(self.ids)

    def runs(self) -> Iterator[CopyRun]:
        """The same copies, those of a run in any order."""
        start, written = 0, set[int]()
        columns = (self.is_onboard.tolist(), self.groups.tolist(), self.ids.tolist(), self.host_ids.tolist())
        copies = list(zip(*columns, strict=True))
        for index, (is_onboard, group, page_id, host_id) in enumerate(copies):
            destination = page_id if is_onboard else host_id
            if (is_onboard, group) != copies[start][:2] or destination in written:
                yield self._run(start, index)
                start, written = index, set()
            written.add(destination)
        if copies:
            yield self._run(start, len(copies))

    def _run(self, start: int, stop: int) -> CopyRun:
        return CopyRun(
            is_onboard=bool(self.is_onboard[start]),
            group=int(self.groups[start]),
            ids=self.ids[start:stop],
            host_ids=self.host_ids[start:stop],
        )


NO_PAGE_COPIES: Final = PageCopies(
    is_onboard=np.zeros(0, bool), **dict.fromkeys(("groups", "ids", "host_ids"), np.zeros(0, np.int64))
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRows:
    """R rows and T tokens; integers are int64. K as in `step_spec`: drafts made for every row.

    A chained row has `1 + num_candidates` tokens, the bonus and the first drafts of its slot, and a context length of
    CHAINED. A given row has its tokens in `token_ids`, the last `num_candidates` of which are drafts. Steps that repeat
    share one object, which is then neither packed nor sent again.
    """

    request_ids: tuple[str, ...]
    slot_ids: Array  # [R]
    num_tokens: Array  # [R]
    num_candidates: Array  # [R], at most K
    context_lens: Array  # [R], tokens whose K/V are committed == position of the first token; or CHAINED
    token_ids: Array  # [T], 0 in chained rows
    sampling: Mapping[str, Array]  # [R] each, by the names of SamplingColumns
    num_draft_tokens: int  # K

    @property
    def num_requests(self) -> int:
        return len(self.slot_ids)

    @cached_property
    def token_offsets(self) -> Array:
        """int64 [R+1], cumulative."""
        offsets = np.zeros(len(self.num_tokens) + 1, np.int64)
        np.cumsum(self.num_tokens, out=offsets[1:])
        return offsets

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Verify blocks alone, or nothing."""
        return bool((self.num_tokens <= self.num_draft_tokens + 1).all())

    def part(self, part: slice) -> StepRows:
        tokens = slice(*self.token_offsets[[part.start, part.stop]])
        return StepRows(
            request_ids=self.request_ids[part],
            slot_ids=self.slot_ids[part],
            num_tokens=self.num_tokens[part],
            num_candidates=self.num_candidates[part],
            context_lens=self.context_lens[part],
            token_ids=self.token_ids[tokens],
            sampling={name: column[part] for name, column in self.sampling.items()},
            num_draft_tokens=self.num_draft_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JointRows:
    """Size of a step of ranks that have requests of their own; all have the same K."""

    num_tokens: tuple[int, ...]  # of each rank
    num_requests: tuple[int, ...]  # of each rank; all 0 in a step of copies alone
    num_prompt_rows: tuple[int, ...]  # of each rank: prompt tokens whose logits are read
    num_draft_tokens: int
    is_decode: bool  # verify blocks alone

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> JointRows:
        """The plans of all ranks."""
        rows = [plan.rows for plan in plans]
        prompts = [plan.prompt_rows for plan in plans]
        return cls(
            num_tokens=tuple(each.total_tokens for each in rows),
            num_requests=tuple(each.num_requests for each in rows),
            num_prompt_rows=tuple(0 if of_rank is None else len(of_rank.token_rows) for of_rank in prompts),
            num_draft_tokens=max(each.num_draft_tokens for each in rows),
            is_decode=all(each.is_decode for each in rows),
        )

    @property
    def num_prompt_parts(self) -> int:
        """Times that ranks compute logits of prompt tokens together."""
        return -(-max(self.num_prompt_rows) // LOGPROBS_ROWS)

    def of_prompt_part(self, part: int) -> tuple[int, ...]:
        """Rows of each rank: one if it has other rows alone."""
        left = [num_rows - part * LOGPROBS_ROWS for num_rows in self.num_prompt_rows]
        rows = zip(self.num_requests, left, strict=True)
        return tuple(max(min(1, num_requests), min(num, LOGPROBS_ROWS)) for num_requests, num in rows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenMasks:
    """The tokens that some rows of logits may give; other rows may give any.

    `rows` int64 [G] are indices into the logits of a step: r * (K + 1) + j for the j-th row of request r. `bits` int32
    [G, ceil(V / 32)] has a bit for each token, little endian, set where it is allowed.
    """

    rows: Array
    bits: Array

    def part(self, part: slice, *, width: int) -> TokenMasks:
        """Those of the requests `part`, which have `width` rows each."""
        start, stop = part.start * width, part.stop * width
        is_in = (self.rows >= start) & (self.rows < stop)
        return TokenMasks(rows=self.rows[is_in] - start, bits=self.bits[is_in])

    def widened(self, width: int, wider: int) -> TokenMasks:
        """The same, where each request has `wider` rows in place of `width`."""
        return TokenMasks(rows=self.rows // width * wider + self.rows % width, bits=self.bits)


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step's rows, preceding changes of page table and slots, token masks, and wanted log probabilities.

    `page_copies` are made before anything else of the step, which has no rows if these are all that there is to do.

    Slots of `restores` are filled from snapshots before the step, slots of `saves` are copied to snapshots when it has
    succeeded; all of them have a row.

    Where ranks have requests of their own (`Mapping.dp_size`), a step has a plan for each, which knows the size of all
    of them: `joint`. Rank 0's has the `others`, of ranks 1, 2, ...
    """

    rows: StepRows
    num_pages: int  # most pages that a row has; positions count from 0 in every group
    page_updates: PageUpdates
    slot_updates: tuple[SlotUpdate, ...] = ()  # for requests with logit rules, and for slots that had one; in order
    masks: TokenMasks | None = None
    top_rows: TopRows | None = None
    prompt_rows: PromptRows | None = None
    restores: StateCopies = NO_COPIES
    saves: StateCopies = NO_COPIES
    page_copies: PageCopies = NO_PAGE_COPIES
    joint: JointRows | None = None
    others: tuple[StepPlan, ...] = ()

    @property
    def has_logprobs(self) -> bool:
        """True if the step gives more than the log probabilities of the emitted tokens."""
        return self.top_rows is not None or self.prompt_rows is not None

    @property
    def num_read_prompt_rows(self) -> int:
        """Prompt tokens whose logits the step computes: where ranks have requests of their own, the most of a rank."""
        own = 0 if self.prompt_rows is None else len(self.prompt_rows.token_rows)
        return own if self.joint is None else max(self.joint.num_prompt_rows)

    def part(self, part: slice) -> StepPlan:
        """The plan of some rows, of a step that failed. Applying the updates again changes nothing.

        The step has made its page copies, or it raised PageCopyError; it may have written to the pages since.
        """
        first, last = self.rows.token_offsets[[part.start, part.stop]].tolist()
        masks = self.masks and self.masks.part(part, width=self.rows.num_draft_tokens + 1)
        prompt_rows = self.prompt_rows and self.prompt_rows.part(first, last)
        rows = self.rows.part(part)
        return replace(
            self,
            rows=rows,
            masks=masks,
            top_rows=self.top_rows and self.top_rows.part(part),
            prompt_rows=prompt_rows,
            restores=self.restores.of_slots(rows.slot_ids),
            saves=self.saves.of_slots(rows.slot_ids),
            page_copies=NO_PAGE_COPIES,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """The outputs of `step_spec.STEP_OUTPUTS` without padding, unchanged: NaN log probabilities included.

    `draft_confidence` is set if the drafter estimates it and K > 0, `top` and `prompt` if the plan asks for them.
    """

    emitted_tokens: Array  # int32 [R, K+1]
    emitted_logprobs: Array  # float32 [R, K+1]
    num_accepted: Array  # int32 [R]
    next_context_lens: Array  # int32 [R]
    draft_tokens: Array  # int32 [R, K]
    draft_confidence: Array | None = None  # float32 [R, K], of each draft if those before it are accepted
    top: TopTokens | None = None  # [R, K+1, N], at the rows that gave emitted_tokens; zeros of who wants none
    prompt: PromptScores | None = None  # [M], [M, N]
    others: tuple[StepResult, ...] = ()  # of StepPlan.others

    @classmethod
    def of_no_rows(cls) -> StepResult:
        """Of a step that only makes its copies."""
        empty = np.zeros((0, 1), np.int32)
        return cls(
            emitted_tokens=empty,
            emitted_logprobs=empty.astype(np.float32),
            num_accepted=empty[:, 0],
            next_context_lens=empty[:, 0],
            draft_tokens=empty[:, :0],
        )


class StepHandle(Protocol):
    """A submitted step: waiting, running or finished."""

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
            StepSkippedError: a step before it failed, so this one did not run.
            Exception: the step's own error.
        """
        ...

    @property
    def elapsed_s(self) -> float:
        """Time on the device; known once `result` has returned."""
        ...


class StepExecutor(Protocol):
    """Runs steps on a device, in the order in which they are submitted.

    A step that raises has stored nothing to its slots. With `can_retry`, it may be submitted again, in parts too,
    unless it raised PageCopyError; otherwise the executor runs nothing any more.
    """

    @property
    def limits(self) -> ExecutorLimits: ...

    @property
    def has_queue(self) -> bool:
        """True if `submit` returns before the step has run; otherwise it runs at once, and raises its error."""
        ...

    @property
    def can_retry(self) -> bool: ...

    def submit(self, plan: StepPlan) -> StepHandle: ...


class StepSkippedError(Exception):
    """A step did not run because a step before it failed. Internal to the engine."""


class PageCopyError(Exception):
    """Copies of a step were not made: pages and places hold something else than the scheduler believes."""


class KnownStep:
    """The handle of a step whose result is known before it is read; `when_read` is called then."""

    def __init__(self, result: StepResult, when_read: Callable[[], None], *, elapsed_s: float) -> None:
        self._result, self._when_read = result, when_read
        self.elapsed_s = elapsed_s

    def result(self) -> StepResult:
        self._when_read()
        return self._result


class FinishedStep:
    """The handle of a step that `run` computes at once."""

    def __init__(self, run: Callable[[], StepResult]) -> None:
        started_s = time.perf_counter()
        self._result = run()
        self.elapsed_s = time.perf_counter() - started_s

    def result(self) -> StepResult:
        return self._result
