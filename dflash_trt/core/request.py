"""Requests, the events of their steps, and their outputs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Optional

from dflash_trt.core.checked_values import Reader, check_fields, instance, integer, number, optional, shown, text
from dflash_trt.core.constraint import TokenConstraint
from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import MAX_SEED as MAX_SEED
from dflash_trt.core.sampling import MAX_STOP_LEN as MAX_STOP_LEN
from dflash_trt.core.sampling import MAX_STOP_STRINGS as MAX_STOP_STRINGS
from dflash_trt.core.sampling import SamplingParams as SamplingParams

if TYPE_CHECKING:  # needs numpy
    from dflash_trt.core.logprobs import PromptLogprob, PromptScores, TokenLogprob, TopTokens

FinishReason = Literal["stop", "length", "cancelled", "error", "timeout"]

_REQUEST_READERS: Final[dict[str, Reader[Any]]] = {
    "request_id": text("a string"),
    "sampling": instance("SamplingParams", SamplingParams),
    "seed": integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED),
    "is_reproducible": instance("true or false", bool),
    "priority": integer("an integer"),
    "queue_timeout_s": optional(number("None, or 0 or more seconds", lambda x: 0.0 <= x <= math.inf)),
    "cache_salt": text("a string"),
    "sample_index": integer("an integer of 0 or more", 0),
    "shares_prompt_of": optional(text("None, or a string")),
    "reports_drafts": instance("true or false", bool),
}


def too_many_tokens(num_tokens: int, max_tokens: int) -> RequestError:
    """Of a prompt."""
    expected = f"at most {max_tokens} tokens (max_seq_len - 1)"
    hint = "Shorten the prompt, or build the engine with a larger max_seq_len."
    return RequestError.about("prompt", expected=expected, found=str(num_tokens), hint=hint)


def check_token_ids(token_ids: Iterable[Any], vocab_size: int) -> None:
    """Raise RequestError unless all are integers, Python's or NumPy's, of the vocabulary."""
    for token_id in token_ids:
        is_integer = type(token_id) is int or (isinstance(token_id, Integral) and not isinstance(token_id, bool))
        if not is_integer or not 0 <= token_id < vocab_size:
            raise RequestError.about(
                "prompt token",
                expected=f"an integer from 0 to {vocab_size - 1}",
                found=shown(token_id),
                hint="Encode the prompt with the tokenizer of the target.",
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be served. `seed` is resolved: `sampling.seed`, or one that the engine drew.

    `is_reproducible` asks for a text that is a function of the seed. A seed that the user did not give may do without
    (`SamplingParams`).

    Requests of higher `priority` go first, among equals the earlier one. `queue_timeout_s` bounds the wait for the
    first step. Prefixes are shared only between requests of equal `cache_salt`. `constraint` is the compiled
    `sampling.grammar_field`.

    A request is one sample of its prompt, `sample_index` of `sampling.n`. It waits until the request that
    `shares_prompt_of` names has computed their prompt, whose pages it then shares.

    The events of one that `reports_drafts` have `draft_token_ids`.

    Raises:
        RequestError: lists every value of a wrong type or out of range.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence ids (unless ignored) and sampling.stop_token_ids
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # spellings of sampling.bad_words, each of one token or more
    seed: int = 0
    is_reproducible: bool = True
    priority: int = 0
    queue_timeout_s: float | None = None
    cache_salt: str = ""
    sample_index: int = 0
    shares_prompt_of: str | None = None
    constraint: TokenConstraint | None = None
    reports_drafts: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _REQUEST_READERS, heading="request")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStatistics:
    """Scheduling of one request. `num_prefix_hit_tokens` of its prompt were in the prefix cache."""

    queue_time_s: float = 0.0  # from arrival to the first step, or to the end of a request that had none
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0


class TokenEvent(NamedTuple):
    """One request's outcome of one step.

    `token_ids` are the tokens emitted by this step, cut after a stop token and at max_new_tokens; empty when a request
    ends without a new token. `num_candidates` is 0 for the step that ended the prefill. `num_accepted` is counted
    before any cut. `statistics` come with the finish_reason. `top` has the most likely tokens at each of the tokens,
    `prompt` comes with the first tokens of a request that wants log probabilities of its prompt. `draft_token_ids` are
    the drafts made for the next step, which verifies the first `num_candidates` of them, unless it has drafts from the
    request's own text to verify, its `ngram_draft_token_ids`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    context_len: int = 0
    num_candidates: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    statistics: RequestStatistics | None = None
    top: Optional["TopTokens"] = None  # [tokens, N]
    prompt: Optional["PromptScores"] = None
    draft_token_ids: tuple[int, ...] = ()
    ngram_draft_token_ids: tuple[int, ...] = ()


def verified_drafts(before: TokenEvent, step: TokenEvent) -> tuple[int, ...]:
    """The drafts that `step` verified, of a request that `reports_drafts`; `before` is its step before."""
    return (step.ngram_draft_token_ids or before.draft_token_ids)[: step.num_candidates]


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A finished request. Times are seconds of the monotonic clock, counted from its arrival.

    `num_verify_steps` counts the steps that verified at least one draft, `num_draft_tokens` the drafts they verified,
    `num_accepted_tokens` those the target agreed with, and `num_emitted_by_verify` = accepted + 1 per such step,
    before any cut by a stop or a length. `time_to_first_token_s` is 0 when no token came.

    `top_logprobs` has an entry for each token, where sampling.top_logprobs asks for them; `prompt_logprobs` one for
    each token of the prompt, None for the first. The output of a prompt is its sample 0, which holds the others.
    """

    request_id: str
    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_by_verify: int
    time_to_first_token_s: float
    total_s: float
    error: str | None = None
    statistics: RequestStatistics = RequestStatistics()
    steps: tuple[TokenEvent, ...] = field(default=(), repr=False)
    top_logprobs: "tuple[tuple[TokenLogprob, ...], ...]" = ()
    prompt_logprobs: "tuple[PromptLogprob | None, ...] | None" = None
    sample_index: int = 0
    other_samples: "tuple[GenerationOutput, ...]" = ()  # samples 1, 2, ..., n - 1; only in sample 0

    @property
    def samples(self) -> "tuple[GenerationOutput, ...]":
        """All samples of the prompt in their order, this one first."""
        return (self, *self.other_samples)

    @property
    def outputs(self) -> "tuple[GenerationOutput, ...]":
        """The samples, under the name that they have in vLLM and TensorRT-LLM."""
        return self.samples

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, bonus included; None when no step verified a draft."""
        return self.num_emitted_by_verify / self.num_verify_steps if self.num_verify_steps else None

    @property
    def inter_token_latency_s(self) -> float | None:
        """Mean time per token after the first; None below 2 tokens."""
        if len(self.token_ids) < 2:
            return None
        return (self.total_s - self.time_to_first_token_s) / (len(self.token_ids) - 1)
