"""The batch that the scheduler gives to a step, and the result that the executor gives back.

Python values only, so that the scheduler needs no torch. The executor turns a StepBatch into the input tensors of
`step_spec`, and the output tensors into a StepResult.
"""

from dataclasses import dataclass
from typing import Protocol

from dflash_trt.core.sampling import StepSampling as StepSampling


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """The tokens that one request computes in a step.

    A verify block is `[anchor, draft_1 .. draft_num_candidates]`; a prefill chunk has num_candidates 0 and any length.
    `page_ids` covers positions 0 .. context_len + len(token_ids) - 1.
    """

    request_id: str
    token_ids: tuple[int, ...]
    context_len: int  # tokens whose K/V are committed == position of token_ids[0]
    num_candidates: int
    page_ids: tuple[int, ...]
    sampling: StepSampling


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The requests of a step, and its K: drafts made, and the maximum of drafts verified, per request."""

    requests: tuple[ScheduledRequest, ...]
    num_draft_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestResult:
    """One request's result. `emitted_tokens` are the accepted drafts, then the bonus: num_accepted + 1 in all.

    Ignore them after a prefill chunk that is not the prompt's last. Where the target's logits gave no token,
    `non_finite_position` is the position before it, and the bonus is missing.
    """

    emitted_tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of emitted_tokens, under the target's unfiltered distribution
    num_accepted: int
    draft_tokens: tuple[int, ...]  # num_draft_tokens of them, for the next step
    next_context_len: int
    non_finite_position: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Results in the order of StepBatch.requests."""

    requests: tuple[RequestResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorLimits:
    """Limits for the scheduler. `max_draft_len` is 0 for an engine without a drafter."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    max_draft_len: int
    page_size: int  # token positions per page
    num_pages: int


class StepExecutor(Protocol):
    """Runs one step on a device; see `step_spec` for the contract."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def step(self, batch: StepBatch) -> StepResult: ...
