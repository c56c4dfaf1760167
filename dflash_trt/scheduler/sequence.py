"""One request in the scheduler, apart from what a running one has in its slot."""

from dataclasses import dataclass, field
from typing import Self

from dflash_trt.core.batch import StepSampling
from dflash_trt.core.constraint import TokenMatcher
from dflash_trt.core.logit_rules import LogitRules
from dflash_trt.core.request import FinishReason, Request, RequestStatistics
from dflash_trt.scheduler.ngram_index import NgramIndex
from dflash_trt.scheduler.prefix_tree import PrefixNode
from dflash_trt.scheduler.prompt_logprobs import PromptLogprobs


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """`token_ids` are the prompt and all emitted tokens; of a running request the slot has them.

    A preempted request has no pages, and its emitted tokens are computed like a prompt.
    """

    request: Request
    arrival_index: int
    arrived_s: float
    max_len: int  # prompt and emitted tokens together never exceed it
    token_ids: list[int]
    slot: int | None = None
    prefix_path: list[PrefixNode] = field(default_factory=list)  # nodes of its first pages
    stale_step: int | None = None  # the newest uncommitted step that has a row of it, from before its preemption
    finish_reason: FinishReason | None = None
    admitted_s: float | None = None
    paused_s: float | None = None  # since when it is paused
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # for a request that wants log probabilities of its prompt
    sampling: StepSampling = field(init=False)
    logit_rules: LogitRules | None = field(init=False)
    matcher: TokenMatcher | None = field(init=False)
    draft_tokens: list[int] = field(default_factory=list)  # with a matcher: the drafts in its slot that it may allow
    ngram_index: NgramIndex = field(default_factory=NgramIndex)  # with SchedulerConfig.ngram: of its committed tokens

    def __post_init__(self) -> None:
        """Raises RequestError: see `LogitRules.of`."""
        self.logit_rules = LogitRules.of(self.request)
        self.sampling = StepSampling.of(
            self.request.sampling, seed=self.request.seed, shares_noise=self.request.is_reproducible
        )
        constraint = self.request.constraint
        self.matcher = None if constraint is None else constraint.start(self.request.stop_token_ids)

    @classmethod
    def of(cls, request: Request, now: float, *, index: int, max_len: int) -> Self:
        """A new arrival; `max_len` is the engine's. Raises RequestError: see `LogitRules.of`."""
        return cls(
            request=request,
            arrival_index=index,
            arrived_s=now,
            max_len=min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, max_len),
            token_ids=list(request.prompt_token_ids),
            prompt_logprobs=PromptLogprobs.of(request),
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority_key(self) -> tuple[int, int]:
        """Sort key: higher priority first, then earlier arrival."""
        return (-self.request.priority, self.arrival_index)

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    def statistics(self, now: float | None = None) -> RequestStatistics:
        """`now` ends the wait of a request that had no step."""
        until_s = now if self.admitted_s is None else self.admitted_s
        assert until_s is not None
        return RequestStatistics(
            queue_time_s=until_s - self.arrived_s,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_preemptions=self.num_preemptions,
        )
