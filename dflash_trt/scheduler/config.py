"""Settings of a scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_trt.core.errors import ConfigError, problem, raise_all


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`max_queue_len` None is unbounded; `max_prefill_tokens` None leaves prefill chunks to max_num_tokens.

    `draft_length_by_context`: see `draft_length.ContextLimit`.
    """

    max_queue_len: int | None = None
    max_prefill_tokens: int | None = None  # prompt tokens per step, all requests together
    enable_prefix_caching: bool = True
    max_paused_s: float | None = 60.0  # a request paused for longer ends with "timeout"; None: never
    preempts_for_priority: bool = True  # a waiting request may preempt a running one of lower priority
    draft_length_by_context: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = [
            problem(f"scheduler {name}", expected="1 or more, or None", found=str(value))
            for name, value in (("max_queue_len", self.max_queue_len), ("max_prefill_tokens", self.max_prefill_tokens))
            if value is not None and value < 1
        ]
        if min((*self.draft_length_by_context, *self.draft_length_by_context.values()), default=0) < 0:
            expected, found = "context lengths and drafts of 0 or more", str(dict(self.draft_length_by_context))
            problems.append(problem("scheduler draft_length_by_context", expected=expected, found=found))
        raise_all(ConfigError, "scheduler configuration", problems)
