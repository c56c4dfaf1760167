"""What statistics should say: counts of a scheduler from what it planned and told, without a look at its counters."""

from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np

from dflash_trt.core.request import TokenEvent
from dflash_trt.core.step_plan import SNAPSHOTS, StepPlan
from dflash_trt.scheduler.data_parallel import DataParallelScheduler
from dflash_trt.scheduler.scheduler import Scheduler
from dflash_trt.scheduler.sequence import Sequence
from dflash_trt.scheduler.statistics import SchedulerStatistics


class Counts:
    """Filled by a Driver; `check` is for a moment at which no step is planned and all events are read."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.events: list[TokenEvent] = []
        self.num_steps = Counter[int]()  # by K
        self.num_computed = self.num_offloaded = self.num_onboarded = 0
        self.num_saved = self.num_loaded = 0  # by a store

    def add(self, scheduler: Scheduler | DataParallelScheduler, request_id: str) -> None:
        """A request that was queued."""
        found = (rank._request_pool.find(request_id) for rank in _ranks(scheduler))
        self.sequences += [sequence for sequence in found if sequence is not None]

    def run(self, plan: StepPlan) -> None:
        """A step that ran and is committed."""
        plans = (plan, *plan.others)
        if any(each.rows.num_requests for each in plans):
            self.num_steps[plan.rows.num_draft_tokens] += 1
        for each in plans:
            is_page = each.page_copies.groups != SNAPSHOTS
            self.num_computed += len(each.rows.token_ids)
            self.num_onboarded += int((is_page & each.page_copies.is_onboard).sum())
            self.num_offloaded += int((is_page & ~each.page_copies.is_onboard).sum())

    def check(self, scheduler: Scheduler | DataParallelScheduler) -> None:
        statistics, expected = scheduler.statistics(), self._expected(scheduler)
        found = {field.name: getattr(statistics, field.name) for field in fields(SchedulerStatistics)}
        del found["num_evicted_pages"]  # tests/scheduler/test_page_store.py
        assert found == expected

    def _expected(self, scheduler: Scheduler | DataParallelScheduler) -> dict[str, Any]:
        ranks = _ranks(scheduler)
        limits, trees = ranks[0].limits, [rank._request_pool.store._tree for rank in ranks]
        verified = [event for event in self.events if event.num_candidates]
        from_text = [event for event in verified if event.ngram_draft_token_ids]
        ended = [event.statistics for event in self.events if event.statistics is not None]
        num_accepted = sum(event.num_accepted for event in verified)
        admitted = [sequence for sequence in self.sequences if sequence.admitted_s is not None]
        return {
            "num_arrivals": len(self.sequences),
            "num_finished": Counter(event.finish_reason for event in self.events if event.finish_reason is not None),
            "num_waiting_now": len(scheduler.request_ids()) - scheduler.num_running - scheduler.num_paused,
            "num_running_now": scheduler.num_running,
            "num_paused_now": scheduler.num_paused,
            "num_steps": self.num_steps.total(),
            "num_steps_by_draft_length": dict(self.num_steps),
            "num_computed_tokens": self.num_computed,
            "num_verify_blocks": len(verified),
            "num_draft_tokens": sum(event.num_candidates for event in verified),
            "num_accepted_tokens": num_accepted,
            "num_emitted_by_verify": num_accepted + len(verified),
            "acceptance_by_position": _rates(verified, limits.max_draft_len),
            "num_preemptions": sum(each.num_preemptions for each in ended),
            "num_admitted_prompt_tokens": sum(len(sequence.request.prompt_token_ids) for sequence in admitted),
            "num_prefix_hit_tokens": sum(each.num_prefix_hit_tokens for each in ended),
            "num_pages": len(ranks) * limits.num_pages,
            "num_pages_in_use_now": sum(rank.num_pages_in_use for rank in ranks),
            "num_pages_kept_now": sum(node.page_id is not None for tree in trees for node in tree.nodes()),
            "num_window_pages": len(ranks) * sum(window.num_pages for window in limits.page_windows),
            "num_window_pages_in_use_now": sum(rank.num_window_pages_in_use for rank in ranks),
            "num_host_pages": len(ranks) * limits.num_host_pages,
            "num_host_pages_kept_now": sum(node.host_id is not None for tree in trees for node in tree.nodes()),
            "num_offloaded_pages": self.num_offloaded,
            "num_onboarded_pages": self.num_onboarded,
            "num_saved_blocks": self.num_saved,
            "num_loaded_blocks": self.num_loaded,
            "num_ngram_draft_tokens": sum(event.num_candidates for event in from_text),
            "num_ngram_accepted_tokens": sum(event.num_accepted for event in from_text),
        }


def _ranks(scheduler: Scheduler | DataParallelScheduler) -> list[Scheduler]:
    return scheduler.ranks if isinstance(scheduler, DataParallelScheduler) else [scheduler]


def _rates(verified: list[TokenEvent], max_draft_len: int) -> tuple[float | None, ...]:
    """By position, of drafts whose predecessors were accepted."""
    reached, accepted = np.zeros((2, max_draft_len))
    for event in verified:
        reached[: min(event.num_accepted + 1, event.num_candidates)] += 1
        accepted[: event.num_accepted] += 1
    return tuple(a / r if r else None for a, r in zip(accepted.tolist(), reached.tolist(), strict=True))
