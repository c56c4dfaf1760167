"""What a caller asks for and what comes back."""

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dflash_trt.core.checked_values import (
    FLOAT32_TINY,
    INT32_MAX,
    Reader,
    check_fields,
    instance,
    integer,
    number,
    optional,
    text,
    tuple_of,
)
from dflash_trt.core.errors import RequestError, problem, raise_all

FinishReason = Literal["stop", "length", "cancelled", "error", "timeout"]

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 256  # characters of one stop string


def _temperature(value: object) -> float:
    """Below the smallest normal float32 the limit is meant: greedy."""
    temperature = _TEMPERATURE(value)
    return temperature if temperature >= FLOAT32_TINY else 0.0


def _top_k(value: object) -> int:
    """More than any vocabulary has is off, whatever it is."""
    return min(_TOP_K(value), INT32_MAX)


def _top_p(value: object) -> float:
    """However small, the most likely token stays."""
    return max(_TOP_P(value), FLOAT32_TINY)


def _stop(value: object) -> tuple[str, ...]:
    return _STOP([value] if isinstance(value, str) else value)


# At this one the tokens are as good as equally likely; far beyond, probabilities are one float32 and top_k sees ties.
_MAX_TEMPERATURE: Final = 10_000.0
_TEMPERATURE: Final = number(f"0 (greedy) to {_MAX_TEMPERATURE:.0f}", lambda x: 0.0 <= x <= _MAX_TEMPERATURE)
_TOP_K: Final = integer("an integer of 0 (off) or more", 0)
_TOP_P: Final = number("a number in (0, 1]", lambda x: 0.0 < x <= 1.0)
_STOP: Final = tuple_of("a string or a list of strings", text("non-empty strings", min_len=1))
_FLAG: Final = instance("true or false", bool)

_SAMPLING_READERS: Final[dict[str, Reader[Any]]] = {
    "max_new_tokens": integer("an integer of 1 or more", 1),
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": number("a number in [0, 1]", lambda x: 0.0 <= x <= 1.0),
    "seed": optional(integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)),
    "stop": _stop,
    "stop_token_ids": tuple_of("a list of token ids", integer("a list of token ids, integers of 0 or more", 0)),
    "ignore_eos": _FLAG,
    "logprobs": _FLAG,
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch their filter off.

    Filters apply in the order temperature, top_k, top_p, min_p, on the target's distribution of every row. A `seed`
    fixes the random numbers of every position; without one the engine draws a seed for each request. K, batch
    mates and prompt chunks change how the sums of a step are rounded, never the distribution: in float32 on a CPU by so
    little that greedy texts are equal and a sampled one changes only at a draw within a rounding of two tokens' border;
    in bfloat16, FP8 and FP4 near-ties are common, and so are changed texts.
    `stop` takes at most MAX_STOP_STRINGS strings of at most MAX_STOP_LEN characters.

    Values are kept as the device will hold them, float32 and int32: a temperature below 1.2e-38 becomes 0 and a top_p
    below it 1.2e-38 (the most likely token alone), a top_k from 2**31 on becomes 2**31 - 1. Numbers of numpy are
    accepted, and so are a single string for `stop`, and lists.

    Raises:
        RequestError: values of a wrong type or out of range, all of them.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        check_fields(self, _SAMPLING_READERS, prefix="sampling ", heading="sampling parameters")
        raise_all(RequestError, "sampling parameters", _stop_problems(self.stop))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_REQUEST_READERS: Final[dict[str, Reader[Any]]] = {
    "request_id": text("a string"),
    "sampling": instance("SamplingParams", SamplingParams),
    "seed": integer(f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED),
    "priority": integer("an integer"),
    "queue_timeout_s": optional(number("None, or 0 or more seconds", lambda x: 0.0 <= x <= math.inf)),
    "cache_salt": text("a string"),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine. `seed` is resolved: `sampling.seed`, or one the engine drew.

    Requests of higher `priority` go first, among equals the earlier one. `queue_timeout_s` bounds the wait for the
    first step. `cache_salt` names whatever else changes K/V: prefixes are shared only between equal salts.

    Raises:
        RequestError: values of a wrong type or out of range, all of them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence ids (unless ignored) and sampling.stop_token_ids
    seed: int = 0
    priority: int = 0
    queue_timeout_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        check_fields(self, _REQUEST_READERS, heading="request")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStatistics:
    """How the scheduler treated one request. `num_prefix_hit_tokens` of its prompt were found computed already."""

    queue_time_s: float = 0.0  # from arrival to the first step, or to the end of a request that had none
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """What one step gave one request.

    `token_ids` are the tokens emitted by this step, cut at a stop token (which is kept) and at max_new_tokens;
    empty when a request ends without a new token. `num_candidates` is 0 for the step that ended the prefill.
    `num_accepted` is the step's own count, before any cut. `statistics` come with the finish_reason.
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


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A finished request. Times are seconds of the monotonic clock, counted from its arrival.

    `num_verify_steps` counts the steps that verified at least one draft, `num_draft_tokens` the drafts they verified,
    `num_accepted_tokens` those the target agreed with, and `num_emitted_by_verify` = accepted + 1 per such step,
    before any cut by a stop or a length. `time_to_first_token_s` is 0 when no token came.
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

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verify step, bonus included; None when no step verified a draft."""
        return self.num_emitted_by_verify / self.num_verify_steps if self.num_verify_steps else None

    @property
    def inter_token_latency_s(self) -> float | None:
        """Mean time per token after the first, which came alone or with others of its step; None below 2 tokens."""
        if len(self.token_ids) < 2:
            return None
        return (self.total_s - self.time_to_first_token_s) / (len(self.token_ids) - 1)


def _stop_problems(stop: tuple[str, ...]) -> list[str]:
    """Their number and length are bounded, for the engine's thread reads all text through them."""
    longest = max(map(len, stop), default=0)
    facts = (
        (len(stop), MAX_STOP_STRINGS, "stop strings"),
        (longest, MAX_STOP_LEN, "characters in a stop string"),
    )
    return [
        problem("sampling stop", expected=f"at most {most} {what}", found=str(number), mend="Pass fewer.")
        for number, most, what in facts
        if number > most
    ]
