"""Counts of a scheduler, for export."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from dflash_trt.core.array import Array
from dflash_trt.core.request import FinishReason
from dflash_trt.scheduler.acceptance import AcceptanceCounts
from dflash_trt.scheduler.commit import StepCounts


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Counts since the start, except those that say "now".

    `acceptance_by_position[i]` is the fraction of drafts at position i that were accepted, among those whose
    predecessors all were. `num_emitted_by_verify` counts accepted + 1 per verify block. `prefix_hit_fraction` is the
    fraction of prompt tokens found in the prefix cache at first admission.
    """

    num_arrivals: int
    num_finished: dict[FinishReason, int]
    num_waiting_now: int
    num_running_now: int
    num_paused_now: int
    num_steps: int
    num_steps_by_draft_length: dict[int, int]
    num_computed_tokens: int  # rows given to the target
    num_verify_blocks: int
    num_draft_tokens: int  # verified
    num_accepted_tokens: int
    num_emitted_by_verify: int
    acceptance_by_position: tuple[float | None, ...]
    num_preemptions: int
    num_admitted_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_pages: int
    num_pages_in_use_now: int
    num_pages_kept_now: int  # by the prefix tree, in use or idle
    num_evicted_pages: int
    num_window_pages: int = 0  # pages of window layers, which have pages of their own
    num_window_pages_in_use_now: int = 0
    num_host_pages: int = 0  # places in the host's tier
    num_host_pages_kept_now: int = 0
    num_offloaded_pages: int = 0  # copied to it, of all page groups
    num_onboarded_pages: int = 0  # copied back
    num_saved_blocks: int = 0  # pages and snapshots written to the disk cache
    num_loaded_blocks: int = 0  # and read from it
    num_ngram_draft_tokens: int = 0  # of num_draft_tokens, from the requests' own texts; the others are the drafter's
    num_ngram_accepted_tokens: int = 0  # of num_accepted_tokens

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify block, bonus included; None before the first."""
        return self.num_emitted_by_verify / self.num_verify_blocks if self.num_verify_blocks else None

    @property
    def prefix_hit_fraction(self) -> float | None:
        """Fraction of prompt tokens found in the prefix cache; None before the first admission."""
        if not self.num_admitted_prompt_tokens:
            return None
        return self.num_prefix_hit_tokens / self.num_admitted_prompt_tokens


def of_all_ranks(
    parts: Sequence[SchedulerStatistics], counts: Sequence[StepCounts], num_steps: Counter[int]
) -> SchedulerStatistics:
    """Sums over ranks that have requests of their own; `num_steps` they ran together, by K."""
    sums = {
        field.name: sum(getattr(part, field.name) for part in parts)
        for field in fields(SchedulerStatistics)
        if isinstance(getattr(parts[0], field.name), int)
    }
    finished = Counter[FinishReason]()
    for part in parts:
        finished.update(part.num_finished)
    joint = {
        "num_finished": dict(finished),
        "num_steps": num_steps.total(),
        "num_steps_by_draft_length": dict(sorted(num_steps.items())),
        "acceptance_by_position": acceptance_rates(np.sum([part.blocks for part in counts], axis=0)),
    }
    return SchedulerStatistics(**sums | joint)


def acceptance_rates(blocks: Array) -> tuple[float | None, ...]:
    """By position, of `StepCounts.blocks`."""
    counts = AcceptanceCounts(len(blocks))
    for num_candidates, num_accepted in zip(*np.nonzero(blocks), strict=True):
        weight = int(blocks[num_candidates, num_accepted])
        counts.add(int(num_candidates) + 1, int(num_accepted), weight=weight)
    return counts.rates()
