"""Logit rules on a CPU: the definition that every other backend must match.

`core/logit_rules.py` has the source of each rule. Slots cost nothing until a request has rules. A step touches the
tokens that the rules name and, for penalties, the tokens in its requests' texts.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from dflash_trt.core.array import Array
from dflash_trt.core.logit_rules import LogitRules, RuledSlots
from dflash_trt.core.step_plan import StepPlan
from dflash_trt.network.ops import StepInputs

# float32 scores [R*(K+1), V] of the target, adjusted in place.
AdjustScores = Callable[[Tensor], None]


def adjustment(slots: RuledSlots, plan: StepPlan, inputs: StepInputs[Tensor]) -> AdjustScores | None:
    """Write the tokens of this step to the slots with rules; None if no row has any."""
    slots.update(plan.slot_updates)
    rows = slots.rows(plan.rows.slot_ids)
    if not rows:
        return None
    offsets, positions, token_ids = (x.numpy() for x in (inputs.token_offsets, inputs.positions, inputs.token_ids))
    for row, _, tokens in rows:
        own = slice(offsets[row], offsets[row + 1])
        tokens[positions[own]] = token_ids[own]
    return partial(_adjust_rows, rows, positions[inputs.logit_rows.numpy()] + 1)


def _adjust_rows(rows: list[tuple[int, LogitRules, Array]], num_known: Array, scores: Tensor) -> None:
    width = num_known.shape[1]
    for row, rules, tokens in rows:
        adjust_scores(scores[row * width : (row + 1) * width], rules, tokens, num_known[row])


def adjust_scores(
    scores: Tensor,  # float32 [W, V], changed
    rules: LogitRules,
    tokens: Array,  # int64 [N], by position
    num_known: Array,  # int [W], tokens before each row's, not falling
) -> None:
    """Apply the rules of one request. Ids beyond the vocabulary have no logits, and are ignored."""
    if len(rules.biases):
        biases = np.where(rules.active_biases(tokens, num_known), rules.biases, _NO_BIAS)
        is_there = rules.token_ids < scores.shape[1]
        columns = torch.from_numpy(rules.token_ids[is_there])
        scores.index_add_(1, columns, torch.from_numpy(biases[:, is_there]))
    if rules.has_penalties:
        first = 0 if rules.repetition_penalty != 1.0 else rules.num_prompt_tokens
        _penalize(scores, rules, tokens[first : num_known[-1]], num_known - first, rules.num_prompt_tokens - first)


def _penalize(scores: Tensor, rules: LogitRules, tokens: Array, num_known: Array, num_prompt_tokens: int) -> None:
    present = np.flatnonzero(np.bincount(tokens))  # U tokens
    indices = np.zeros(int(present.max(initial=0)) + 1, np.int64)
    indices[present] = np.arange(len(present))
    indices = indices[tokens]
    columns = torch.from_numpy(present)
    penalized = scores.index_select(1, columns)  # [W, U]
    if rules.repetition_penalty != 1.0:
        is_seen = _counts(indices, 0, num_known, len(present)) > 0
        penalty = rules.repetition_penalty
        repeated = torch.where(penalized < 0, penalized * penalty, penalized / penalty)
        penalized = torch.where(is_seen, repeated, penalized)
    counts = _counts(indices, num_prompt_tokens, num_known, len(present))
    penalized -= rules.frequency_penalty * counts
    penalized -= rules.presence_penalty * (counts > 0)
    scores.index_copy_(1, columns, penalized)


def _counts(indices: Array, start: int, ends: Array, size: int) -> Tensor:
    """Counts of `indices` from `start` to each end, float32 [W, size]."""
    edges = [start, *np.maximum(ends, start).tolist()]
    counts = [np.bincount(indices[first:end], minlength=size) for first, end in pairwise(edges)]
    return torch.from_numpy(np.cumsum(counts, axis=0, dtype=np.float32))


_NO_BIAS: Final = np.float32(0.0)
