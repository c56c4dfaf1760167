"""What a caller asks for and what comes back."""

import math
from dataclasses import dataclass, field
from typing import Literal

from dflash_trt.core.errors import RequestError, problem, raise_all

FinishReason = Literal["stop", "length", "cancelled", "error", "timeout"]

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 256  # characters of one stop string


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 switch their filter off.

    Filters apply in the order temperature, top_k, top_p, min_p, on the target's distribution of every row. A `seed`
    fixes the random numbers of every position; without one the engine draws a seed for each request. In float32 on a
    CPU it fixes the text, whatever K, batch mates and prompt chunks are. In bfloat16, FP8 and FP4, and on a GPU, the
    shape of a step decides how sums are rounded, so near-ties may fall differently; the distribution is the same.
    `stop` takes at most MAX_STOP_STRINGS strings of at most MAX_STOP_LEN characters.
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
        problems = [
            problem(f"sampling {name}", expected=expected, found=repr(value), mend="Pass a value in that range.")
            for name, value, is_valid, expected in (
                ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
                ("temperature", self.temperature, _is_in(self.temperature, 0.0, math.inf), "0 or more, finite"),
                ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
                ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "a number in (0, 1]"),
                ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "a number in [0, 1]"),
                ("seed", self.seed, self.seed is None or 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
                ("stop", self.stop, all(self.stop), "non-empty strings"),
            )
            if not is_valid
        ]
        problems += _stop_problems(self.stop)
        raise_all(RequestError, "sampling parameters", problems)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt on its way through the engine. `seed` is resolved: `sampling.seed`, or one the engine drew.

    Requests of higher `priority` go first, among equals the earlier one. `queue_timeout_s` bounds the wait for the
    first step. `cache_salt` names whatever else changes K/V: prefixes are shared only between equal salts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence ids (unless ignored) and sampling.stop_token_ids
    seed: int = 0
    priority: int = 0
    queue_timeout_s: float | None = None
    cache_salt: str = ""


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


def _is_in(value: float, low: float, high: float) -> bool:
    return low <= value < high


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
