"""One request's tokens, pages and progress in the scheduler."""

from dataclasses import dataclass, field

from dflash_trt.core.batch import RequestResult, ScheduledRequest, StepSampling
from dflash_trt.core.errors import problem
from dflash_trt.core.request import FinishReason, Request, RequestStatistics, TokenEvent
from dflash_trt.scheduler.prefix_tree import PrefixNode


@dataclass(kw_only=True, slots=True)
class InFlightRow:
    """A request's row of a planned, uncommitted step."""

    num_tokens: int  # at most this many positions are written
    is_emitting: bool  # False for a prefill chunk that is not the last
    num_draft_tokens: int  # K of that step


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """`token_ids` are the prompt and all emitted tokens. `context_len` of them have their K/V in `page_ids`.

    The tokens after `context_len` are to be computed: the rest of a prompt, or the anchor. A preempted request has
    context_len 0 and no pages, and its emitted tokens are computed like a prompt.
    """

    request: Request
    arrival_index: int
    arrived_s: float
    max_len: int  # prompt and emitted tokens together never exceed it
    token_ids: list[int]
    context_len: int = 0
    draft_tokens: tuple[int, ...] = ()
    page_ids: list[int] = field(default_factory=list)
    prefix_path: list[PrefixNode] = field(default_factory=list)  # nodes of the first pages of page_ids
    in_flight: InFlightRow | None = None
    epoch: int = 0  # number of admissions; a row of an earlier epoch wrote pages that are gone
    finish_reason: FinishReason | None = None
    admitted_s: float | None = None
    paused_s: float | None = None  # since when it is paused
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    sampling: StepSampling = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = StepSampling.of(self.request.sampling, seed=self.request.seed)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def priority_key(self) -> tuple[int, int]:
        """Sort key: higher priority first, then earlier arrival."""
        return (-self.request.priority, self.arrival_index)

    @property
    def is_running(self) -> bool:
        return bool(self.page_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens without K/V that no planned step computes; 1 for a request that decodes.

        After a step in flight that emits, the pending token is its bonus.
        """
        if self.in_flight is None:
            return len(self.token_ids) - self.context_len
        if self.in_flight.is_emitting:
            return 1
        return len(self.token_ids) - self.context_len - self.in_flight.num_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_pending == 1

    @property
    def is_ending(self) -> bool:
        """True if the step in flight certainly emits the last token."""
        return self.in_flight is not None and self.in_flight.is_emitting and self.num_remaining <= 1

    @property
    def max_context_len(self) -> int:
        """context_len, or its maximum after the step in flight."""
        if self.in_flight is None:
            return self.context_len
        return min(self.context_len + self.in_flight.num_tokens, self.max_len - 1)

    @property
    def max_candidates(self) -> int:
        """Drafts worth verifying next: those that could still be emitted with a bonus token after them."""
        if self.in_flight is None:
            return max(0, min(len(self.draft_tokens), self.num_remaining - 1))
        if not self.in_flight.is_emitting:
            return 0
        return max(0, min(self.in_flight.num_draft_tokens, self.num_remaining - 2))

    def statistics(self, now: float) -> RequestStatistics:
        return RequestStatistics(
            queue_time_s=(now if self.admitted_s is None else self.admitted_s) - self.arrived_s,
            num_prefix_hit_tokens=self.num_prefix_hit_tokens,
            num_preemptions=self.num_preemptions,
        )

    def advance(self, row: ScheduledRequest, result: RequestResult) -> TokenEvent | None:
        """Commit a row; None for a prompt chunk that is not the last."""
        if row.context_len + len(row.token_ids) - row.num_candidates < len(self.token_ids):
            self.context_len = result.next_context_len
            return None
        event = self.append(row, result)
        self.context_len = min(result.next_context_len, len(self.token_ids))  # without drafts after a stop token
        self.draft_tokens = result.draft_tokens
        return event

    def append(self, row: ScheduledRequest, result: RequestResult) -> TokenEvent:
        """Append emitted tokens, cut after a stop token and at max_len; set finish_reason at the end.

        A row that gave no token ends the request, unless the request ends before that row.
        """
        emitted = result.emitted_tokens[: self.num_remaining]
        for index, token in enumerate(emitted):
            if token in self.request.stop_token_ids:
                emitted = emitted[: index + 1]
                self.finish_reason = "stop"
                break
        self.token_ids.extend(emitted)
        if self.finish_reason is None and self.num_remaining == 0:
            self.finish_reason = "length"
        error = None
        has_bonus = True
        if self.finish_reason is None and result.non_finite_position is not None:
            self.finish_reason, error = "error", _non_finite(result.non_finite_position)
            has_bonus = False  # such a block does not count for acceptance
        return TokenEvent(
            request_id=self.request_id,
            token_ids=emitted,
            logprobs=result.logprobs[: len(emitted)] if self.request.sampling.logprobs else (),
            context_len=row.context_len,
            num_candidates=row.num_candidates if has_bonus else 0,
            num_accepted=result.num_accepted if has_bonus else 0,
            finish_reason=self.finish_reason,
            error=error,
        )


def _non_finite(position: int) -> str:
    return problem(
        "target",
        expected="finite logits",
        found=f"NaN or infinity: the logits are not finite at position {position}",
        hint="Check the weights and the dtype of the engine: bfloat16 models may overflow in float16.",
    )
