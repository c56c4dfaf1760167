"""Settings of a scheduler, and objects in their place."""

from dataclasses import dataclass
from typing import TypedDict

from dflash_trt.core.errors import ConfigError, problem, raise_all
from dflash_trt.scheduler.draft_length import DraftLengthPolicy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Scheduler limits and switches.

    `max_queue_len` None is unbounded; `max_prefill_tokens` None leaves prefill chunks to max_num_tokens.
    """

    max_queue_len: int | None = None
    max_prefill_tokens: int | None = None  # prompt tokens per step, all requests together
    enable_prefix_caching: bool = True
    max_paused_s: float | None = 60.0  # a request paused for longer ends with "timeout"; None means no limit
    preempts_for_priority: bool = True  # a waiting request may preempt a running one of lower priority
    ngram: bool = False  # verify drafts from a request's own text where its last tokens match earlier ones

    def __post_init__(self) -> None:
        problems = [
            problem(f"scheduler {name}", expected="1 or more, or None", found=str(value))
            for name, value in (("max_queue_len", self.max_queue_len), ("max_prefill_tokens", self.max_prefill_tokens))
            if value is not None and value < 1
        ]
        raise_all(ConfigError, "scheduler configuration", problems)


class Policies(TypedDict, total=False):
    """Objects that decide instead of an engine's settings."""

    scheduler_config: SchedulerConfig | None
    draft_length_policy: DraftLengthPolicy | None
