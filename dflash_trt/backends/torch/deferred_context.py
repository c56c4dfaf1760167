"""The drafter's context of steps without drafts, computed only for requests that draft later.

Context K/V of DFlash depend on the target's taps and on positions alone. So a step with K = 0 keeps the taps, and the
next step with drafts computes what its requests lack. Taps of the latest steps wait in a log, which is then sorted into
blocks of memory, one per page. When no block is free, the ones that were written to longest ago are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_trt.backends.page_budget import PagePlan
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.core.array import Array
from dflash_trt.core.step_plan import SNAPSHOTS, PageCopies
from dflash_trt.network.decoder import TargetRun
from dflash_trt.network.drafters.dflash import DFlashDrafter
from dflash_trt.network.ops import Acceptance, Rows
from dflash_trt.network.state import StepState
from dflash_trt.network.step import Network

_MEMORY_FRACTION = 8  # taps take at most an eighth of the memory for K/V
_FREED_FRACTION = 8  # of the blocks, computed together when none is free
_PAGES_PER_CALL = 64
_FEWEST_LOGGED_TOKENS, _MOST_LOGGED_TOKENS = 512, 8192  # at which the log is sorted


def deferred_context(
    network: Network[Tensor], page_plan: PagePlan, *, max_batch_size: int, max_num_tokens: int, dtype: torch.dtype
) -> DeferredContext | None:
    """None if the drafter's context is not DFlash's or has pages of its own, or if memory is short."""
    drafter = network.drafter
    if not isinstance(drafter, DFlashDrafter) or page_plan.page_windows:
        return None
    num_row_bytes = len(drafter.spec.target_layer_ids) * drafter.spec.target_hidden_size * dtype.itemsize
    num_blocks = page_plan.total_bytes // _MEMORY_FRACTION // (page_plan.page_size * num_row_bytes)
    num_blocks = min(num_blocks, page_plan.num_pages)
    # A log has a page for each of its requests that is not full, and takes at most half of the blocks.
    num_logged = (num_blocks // 2 - 2 * max_batch_size) * page_plan.page_size - max_num_tokens
    if num_logged < _FEWEST_LOGGED_TOKENS:
        return None
    num_logged = min(num_logged, _MOST_LOGGED_TOKENS)
    return DeferredContext(drafter, page_plan, num_blocks=num_blocks, num_logged_tokens=num_logged, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Logged:
    """Taps of a step, and where its tokens are."""

    taps: Sequence[Tensor]  # [N, H]
    positions: Array
    pages: Array


class DeferredContext:
    """Taps of steps without drafts, which a DFlash drafter observes when a step with drafts needs them."""

    def __init__(
        self,
        drafter: DFlashDrafter[Tensor],
        page_plan: PagePlan,
        *,
        num_blocks: int,
        num_logged_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._drafter = drafter
        self._page_size = page_plan.page_size
        self._width = drafter.spec.target_hidden_size
        self._log: list[_Logged] = []
        self._num_logged, self._most_logged = 0, num_logged_tokens
        # Memory that is never written to costs nothing.
        num_rows, row_width = num_blocks * self._page_size, len(drafter.spec.target_layer_ids) * self._width
        self._taps = torch.empty((num_rows, row_width), dtype=dtype)
        self._blocks = np.full(page_plan.num_pages, -1)  # of pages
        # Of blocks: the page, its number in a sequence, the part of it that is kept, and when it was written to.
        self._pages, self._columns, self._starts, self._stops, self._written = np.zeros((5, num_blocks), np.int64)
        self._free = list(reversed(range(num_blocks)))
        self._num_sorted = 0  # times

    def is_complete(self, page_tables: Array, num_tokens: Array) -> bool:  # [R, P], [R]
        """True if there is nothing of the pages that requests of these lengths have, theirs or an earlier owner's."""
        if self._log:
            return False
        if len(self._free) == len(self._pages):
            return True
        is_used = np.arange(page_tables.shape[1]) * self._page_size < num_tokens[:, None]
        return bool((self._blocks[page_tables[is_used]] < 0).all())

    def keep(self, target: TargetRun[Tensor], ops: TorchOps, state: StepState[Tensor]) -> None:
        """Keep the taps of a step without drafts."""
        positions = target.rows.positions.numpy().copy()
        taps = [tap.clone() for tap in target.taps]  # the memory of a step may be the next one's, too
        self._log.append(_Logged(taps, positions, self._pages_of(target.rows, positions)))
        self._num_logged += len(positions)
        if self._num_logged >= self._most_logged:
            self._sort_log(ops, state)

    def complete(self, ops: TorchOps, state: StepState[Tensor]) -> None:
        """Compute what the requests of a step with drafts lack, before it."""
        rows = ops.token_rows()
        if self._log:
            self._sort_log(ops, state)
        if len(self._free) < len(self._pages):
            self._forget(self._begun_by(rows))
            self._compute(ops, self._blocks_of(rows), state)

    def before_copies(self, ops: TorchOps, copies: PageCopies, state: StepState[Tensor]) -> None:
        """Complete the pages that are copied out, and forget what those had that others are copied to."""
        if self._log:
            self._sort_log(ops, state)
        is_page = copies.groups != SNAPSHOTS
        blocks = self._blocks[copies.ids[is_page & ~copies.is_onboard]]
        self._compute(ops, np.unique(blocks[blocks >= 0]), state)
        self._forget(copies.ids[is_page & copies.is_onboard])

    def _pages_of(self, rows: Rows[Tensor], positions: Array) -> Array:
        """The page of each token."""
        assert rows.token_offsets is not None
        table = rows.page_table.numpy()
        requests = np.arange(len(table))
        if len(table) < len(positions):
            requests = np.repeat(requests, np.diff(rows.token_offsets.numpy()))
        pages: Array = table[requests, positions // self._page_size]
        return pages

    def _begun_by(self, rows: Rows[Tensor]) -> Array:
        """Pages whose first token is among these rows: what they had is another owner's."""
        positions = rows.positions.numpy()
        begun: Array = self._pages_of(rows, positions)[positions % self._page_size == 0]
        return begun

    def _blocks_of(self, rows: Rows[Tensor]) -> Array:
        """Blocks of what the rows' requests have in pages."""
        num_pages = -(-rows.context_lens.numpy() // self._page_size)
        table = rows.page_table.numpy()
        blocks = self._blocks[table[np.arange(table.shape[1]) < num_pages[:, None]]]
        found: Array = np.unique(blocks[blocks >= 0])
        return found

    def _sort_log(self, ops: TorchOps, state: StepState[Tensor]) -> None:
        log, self._log, self._num_logged = self._log, [], 0
        self._num_sorted += 1
        pages = np.concatenate([step.pages for step in log])
        positions = np.concatenate([step.positions for step in log])
        new = np.unique(pages[self._blocks[pages] < 0])
        if len(new) > len(self._free):
            self._compute(ops, self._oldest(len(new) - len(self._free), pages), state)
            new = np.unique(pages[self._blocks[pages] < 0])
        for page in new.tolist():
            block = self._blocks[page] = self._free.pop()
            self._pages[block], self._starts[block], self._stops[block] = page, 0, 0
        self._note(pages, *np.divmod(positions, self._page_size))
        rows = torch.from_numpy(self._blocks[pages] * self._page_size + positions % self._page_size)
        for index, taps in enumerate(zip(*(step.taps for step in log), strict=True)):
            kept = self._taps[:, index * self._width : (index + 1) * self._width]
            kept.index_copy_(0, rows, taps[0] if len(taps) == 1 else torch.cat(taps))

    def _note(self, pages: Array, columns: Array, offsets: Array) -> None:
        """Note which part of its page each block has, of tokens in the order in which they were computed."""
        order = np.argsort(pages, kind="stable")
        pages, columns, offsets = pages[order], columns[order], offsets[order]
        is_last = np.append((pages[1:] != pages[:-1]) | (offsets[1:] != offsets[:-1] + 1), True)
        is_first = np.append(True, is_last[:-1])
        for page, column, start, stop in zip(
            pages[is_first].tolist(),
            columns[is_first].tolist(),
            offsets[is_first].tolist(),
            (offsets[is_last] + 1).tolist(),
            strict=True,
        ):
            block = self._blocks[page]
            # Otherwise the page has another owner now, or is computed again.
            continues = column == self._columns[block] and self._starts[block] < start <= self._stops[block]
            self._starts[block] = self._starts[block] if continues else start
            self._columns[block], self._stops[block], self._written[block] = column, stop, self._num_sorted

    def _oldest(self, num_blocks: int, pages: Array) -> Array:
        """At least `num_blocks` of those in use, none of `pages`."""
        used = np.setdiff1d(np.arange(len(self._pages)), np.append(self._free, self._blocks[pages]))
        num_blocks = max(num_blocks, len(self._pages) // _FREED_FRACTION)
        oldest: Array = used[np.argsort(self._written[used], kind="stable")[:num_blocks]]
        return oldest

    def _compute(self, ops: TorchOps, blocks: Array, state: StepState[Tensor]) -> None:
        """Write the context K/V of these blocks' pages, and free them."""
        for first in range(0, len(blocks), _PAGES_PER_CALL):
            part = blocks[first : first + _PAGES_PER_CALL]
            self._compute_part(ops, part, state)
            self._forget(self._pages[part])

    def _forget(self, pages: Array) -> None:
        """Free the blocks of these pages."""
        blocks = np.unique(self._blocks[pages])
        self._blocks[pages] = -1
        self._free += blocks[blocks >= 0].tolist()

    def _compute_part(self, ops: TorchOps, blocks: Array, state: StepState[Tensor]) -> None:
        """As a step in which every page is a request."""
        starts, stops, columns = self._starts[blocks], self._stops[blocks], self._columns[blocks]
        token_offsets = np.append(0, np.cumsum(stops - starts))
        offsets = np.arange(token_offsets[-1]) + np.repeat(starts - token_offsets[:-1], stops - starts)
        request = np.repeat(np.arange(len(blocks)), stops - starts)
        page_table = np.zeros((len(blocks), columns.max() + 1), np.int32)
        page_table[np.arange(len(blocks)), columns] = self._pages[blocks]
        ends = _int32(columns * self._page_size + stops)
        ops = ops.for_rows(
            token_ids=torch.zeros(len(offsets), dtype=torch.int32),
            positions=_int32(columns[request] * self._page_size + offsets),
            token_offsets=_int32(token_offsets),
            context_lens=_int32(columns * self._page_size + starts),
            page_table=torch.from_numpy(page_table),
        )
        kept = self._taps.index_select(0, torch.from_numpy(blocks[request] * self._page_size + offsets))
        taps = [kept[:, start : start + self._width] for start in range(0, kept.shape[1], self._width)]
        target = TargetRun(hidden=kept, taps=taps, rows=ops.token_rows())
        self._drafter.observe(ops, target.rows.positions, target, _all_accepted(ends), state)


def _all_accepted(ends: Tensor) -> Acceptance[Tensor]:
    """Of rows that are given whole: nothing was drafted, sampled or emitted."""
    none = ends[:0]
    return Acceptance(
        emitted_tokens=none, emitted_logprobs=none, num_accepted=none, bonus_tokens=none, next_context_lens=ends
    )


def _int32(values: Array) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
