"""Rows of requests with a constraint: the host sees all their tokens before it plans the next row.

So such a row is never chained after an uncommitted one, and drafts after the first one that the constraint refuses are
not verified. With rejection sampling the refused draft itself is verified: it is rejected, and the token is sampled
from the residual of the target's distribution.
"""

from itertools import accumulate

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.constraint import ConstraintError, MaskedBlock
from dflash_trt.core.errors import problem
from dflash_trt.core.step_plan import StepResult, StepRows, TokenMasks
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.slots import SlotTable


def may_follow(table: SlotTable, slots: Array) -> Array:
    """True where the next row needs no result of an uncommitted one."""
    follows: Array = ~table.is_constrained[slots] | ~table.flight_emits[slots]
    return follows


def allowed_candidates(table: SlotTable, slots: Array, num_candidates: Array) -> Array:
    """`num_candidates`, cut at the first draft that a request's constraint refuses: see above."""
    constrained = np.flatnonzero(table.is_constrained[slots])
    if not len(constrained):
        return num_candidates
    num_candidates = num_candidates.copy()
    for row in constrained.tolist():
        sequence = table.sequences[slots[row]]
        assert sequence is not None and sequence.matcher is not None
        drafts = sequence.draft_tokens[: num_candidates[row]]
        sequence.draft_tokens = drafts[: sequence.matcher.num_allowed(drafts)]
        uses_rejection = table.sampling["draft_stream"][slots[row]] == 1
        num_candidates[row] = min(len(sequence.draft_tokens) + uses_rejection, num_candidates[row])
    return num_candidates


def token_masks(table: SlotTable, rows: StepRows, is_emitting: Array) -> TokenMasks | None:
    """Masks for all rows of logits of the constrained requests; None without any."""
    constrained = np.flatnonzero(table.is_constrained[rows.slot_ids] & is_emitting).tolist()
    if not constrained:
        return None
    blocks = [_block(table, rows, row) for row in constrained]
    width, lengths = rows.num_draft_tokens + 1, [block.num_rows for block in blocks]
    bits = np.full((sum(lengths), blocks[0].matcher.num_mask_words), -1, np.int32)
    blocks[0].matcher.fill_masks(blocks, bits)
    starts = [0, *accumulate(lengths)][:-1]
    firsts = np.array(constrained) * width - starts
    return TokenMasks(rows=np.arange(len(bits)) + np.repeat(firsts, lengths), bits=bits)


def _block(table: SlotTable, rows: StepRows, row: int) -> MaskedBlock:
    sequence = table.sequences[rows.slot_ids[row]]
    assert sequence is not None and sequence.matcher is not None
    return MaskedBlock(sequence.matcher, sequence.draft_tokens[: rows.num_candidates[row]])


def advance(
    sequence: Sequence, result: StepResult, row: int, num_emitted: int, *, is_stopped: bool
) -> tuple[int, bool]:
    """Take in a row's emitted tokens, the last of which is a stop token if `is_stopped`.

    Returns how many count, and whether the request ends with them: also where its constraint allows no other, in front
    of a stop token.

    Raises:
        ConstraintError: a token is not allowed.
    """
    matcher = sequence.matcher
    assert matcher is not None
    num_allowed = matcher.advance(result.emitted_tokens[row, : num_emitted - is_stopped].tolist())
    sequence.draft_tokens = result.draft_tokens[row].tolist()
    return (num_allowed, True) if matcher.is_finished else (num_emitted, is_stopped)


def refusal(sequence: Sequence, error: ConstraintError) -> str:
    """The error of a request whose constraint has failed."""
    return problem(
        f"request {sequence.request_id!r} {sequence.request.sampling.grammar_field}",
        expected="tokens that it allows",
        found=str(error),
        hint="Simplify it; if it is simple, this is a bug: please report it.",
    )
