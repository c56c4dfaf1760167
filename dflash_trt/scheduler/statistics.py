"""Counts of a scheduler, for export."""

from collections import Counter
from dataclasses import dataclass, field

from dflash_trt.core.request import FinishReason
from dflash_trt.scheduler.acceptance import AcceptanceCounts
from dflash_trt.scheduler.commit import CommittedStep


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


@dataclass(kw_only=True)
class StepCounts:
    """Running counts of committed steps."""

    acceptance: AcceptanceCounts
    num_finished: Counter[FinishReason] = field(default_factory=Counter)
    num_steps: int = 0
    num_steps_by_draft_length: Counter[int] = field(default_factory=Counter)
    num_computed_tokens: int = 0
    num_verify_blocks: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, committed: CommittedStep) -> None:
        """Count a committed step."""
        plan, has_block = committed.step.plan, committed.num_candidates > 0
        candidates, accepted = committed.num_candidates[has_block], committed.num_accepted[has_block]
        self.num_steps += 1
        self.num_steps_by_draft_length[plan.num_draft_tokens] += 1
        self.num_computed_tokens += plan.total_tokens
        self.num_verify_blocks += len(candidates)
        self.num_draft_tokens += int(candidates.sum())
        self.num_accepted_tokens += int(accepted.sum())
        self.acceptance.add_all(candidates, accepted)
