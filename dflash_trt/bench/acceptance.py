"""Acceptance of drafts, with its uncertainty: one definition for engines and for servers.

A text is a row of counts [2 + 2K]: tokens that verify steps emitted, verify steps, and for each draft position the
steps that accepted a draft there and those that verified one. Rows add up, so that a conversation, or all samples of
a prompt, are one row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bench.intervals import Interval, interval, quotient_interval
from dflash_trt.core.request import TokenEvent

Counts = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """Acceptance over verify steps. `length` counts the bonus.

    `by_position[i]` is the fraction of the steps verifying draft i (from 0) that accepted it, and every draft before.
    """

    num_verify_steps: int
    length: float
    length_interval: Interval
    by_position: tuple[float, ...]
    by_position_interval: tuple[Interval, ...]


def counts_of_texts(texts: Sequence[Sequence[TokenEvent]]) -> list[Counts]:
    """A row of each text, from its steps; those that verified no draft do not count."""
    num_positions = max((step.num_candidates for steps in texts for step in steps), default=0)
    return [_counts_of_text(steps, num_positions) for steps in texts]


def _counts_of_text(steps: Sequence[TokenEvent], num_positions: int) -> Counts:  # [2 + 2 * num_positions]
    emitted, accepted, verified = 0, np.zeros(num_positions + 1), np.zeros(num_positions + 1)
    for step in steps:
        if step.num_candidates:
            emitted += step.num_accepted + 1
            accepted[step.num_accepted] += 1
            verified[step.num_candidates] += 1
    return np.concatenate([[emitted, verified.sum()], _at_least(accepted), _at_least(verified)])


def counts_of_answers(answers: Sequence[Mapping[str, Any]]) -> list[Counts]:
    """A row of each `speculative_decoding` of a server, which has verified drafts.

    Without `per_step_drafted`, which is optional, every step counts as one that verified `num_spec_tokens` drafts.
    """
    num_positions = max((len(answer["acceptance_histogram"]) - 1 for answer in answers), default=0)
    return [_counts_of_answer(answer, num_positions) for answer in answers]


def _counts_of_answer(answer: Mapping[str, Any], num_positions: int) -> Counts:  # [2 + 2 * num_positions]
    accepted, verified = np.zeros(num_positions + 1), np.zeros(num_positions + 1)
    accepted[: len(answer["acceptance_histogram"])] = answer["acceptance_histogram"]
    for num_drafted in answer.get("per_step_drafted") or [answer["num_spec_tokens"]] * answer["num_spec_steps"]:
        verified[num_drafted] += 1
    num_steps = answer["num_spec_steps"]
    emitted = num_steps + answer["num_accepted_draft_tokens"]
    return np.concatenate([[emitted, num_steps], _at_least(accepted), _at_least(verified)])


def _at_least(histogram: NDArray[np.float64]) -> NDArray[np.float64]:
    """How often a number was 1 or more, 2 or more, ..., from how often it was 0, 1, 2, ..."""
    return histogram[::-1].cumsum()[::-1][1:]


def acceptance(counts: Sequence[Counts]) -> Acceptance | None:
    """Over texts; None where no step verified a draft."""
    table = np.array(counts)  # [texts, 2 + 2K]
    if not len(table) or not table[:, 1].any():
        return None
    num_positions = (table.shape[1] - 2) // 2
    sums = table.sum(axis=0)
    positions = [index for index in range(num_positions) if sums[2 + num_positions + index]]
    pairs = [(2 + index, 2 + num_positions + index) for index in positions]
    return Acceptance(
        num_verify_steps=int(sums[1]),
        length=float(sums[0] / sums[1]),
        length_interval=quotient_interval(table[:, 0], table[:, 1]),
        by_position=tuple(float(sums[part] / sums[whole]) for part, whole in pairs),
        by_position_interval=tuple(quotient_interval(table[:, part], table[:, whole]) for part, whole in pairs),
    )


def accepted_by_group(groups: Mapping[str, Sequence[Counts]]) -> dict[str, Acceptance]:
    """Groups without a verify step are left out."""
    found = {name: acceptance(counts) for name, counts in groups.items()}
    return {name: value for name, value in found.items() if value is not None}


def accepted_by_category(categories: Iterable[str | None], counts: Iterable[Counts]) -> dict[str, Acceptance]:
    """By the category of each text, where it has one."""
    groups: dict[str, list[Counts]] = {}
    for category, row in zip(categories, counts, strict=True):
        if category is not None:
            groups.setdefault(category, []).append(row)
    return accepted_by_group({name: groups[name] for name in sorted(groups)})


def ratio_interval(ours: Sequence[Counts], theirs: Sequence[Counts]) -> Interval:
    """Of the quotient of two acceptance lengths over the same texts, which are drawn in pairs."""
    table = np.column_stack([np.array(ours)[:, :2], np.array(theirs)[:, :2]])
    return interval(table, lambda sums: sums[0] * sums[3] / (sums[1] * sums[2]))
