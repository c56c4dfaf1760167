"""Drafts from a request's own text: what followed the longest earlier match of its last tokens.

Suffix decoding (arXiv 2411.04975) and prompt lookup. The drafts are a function of committed tokens alone, so a step may
verify them in place of the drafter's without any effect on the distribution of texts.
"""

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.scheduler.slots import SlotTable


class NgramDrafts:
    """Drafts for the decoding requests of a table, whose tokens the host knows."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def propose(self, slots: Array, num_draft_tokens: int) -> dict[int, list[int]]:
        """Drafts by slot, for slots without an uncommitted row; a constrained request has them as its drafts then."""
        table, drafts = self._table, dict[int, list[int]]()
        num_drafts = np.minimum(table.max_candidates(slots), num_draft_tokens)
        is_known = (table.flight_tokens[slots] == 0) & (num_drafts > 0)
        known = slots[is_known]
        counts, lens = num_drafts[is_known].tolist(), table.num_tokens[known].tolist()
        for slot, count, num_tokens in zip(known.tolist(), counts, lens, strict=True):
            sequence = table.sequences[slot]
            assert sequence is not None, "a decoding slot has a request"
            index = sequence.ngram_index
            index.extend(table.token_ids[slot, len(index) : num_tokens].tolist())
            if found := index.drafts(count):
                drafts[slot] = found
                if sequence.matcher is not None:
                    sequence.draft_tokens = found
        return drafts

    def give_rows(
        self,
        drafts: dict[int, list[int]],
        slots: Array,
        num_candidates: Array,
        *,
        context_lens: Array,  # int64 [R], of rows that are chained so far
        token_ids: Array,  # int64 [T], of the same rows
    ) -> None:
        """Make given rows of the slots that have drafts: the last token, and as many drafts as the row verifies."""
        starts = np.cumsum(num_candidates + 1) - num_candidates - 1
        for row, (slot, start, count) in enumerate(
            zip(slots.tolist(), starts.tolist(), num_candidates.tolist(), strict=True)
        ):
            if count and slot in drafts:
                last = int(self._table.token_ids[slot, self._table.num_tokens[slot] - 1])
                context_lens[row] = self._table.context_len[slot]
                token_ids[start : start + 1 + count] = [last, *drafts[slot][:count]]
