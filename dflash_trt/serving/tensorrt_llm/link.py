"""The interface between the engine and whatever runs TensorRT-LLM: requests out, answers in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from dflash_trt.core.logprobs import PromptScores, TokenLogprob
from dflash_trt.core.request import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A request's result of an iteration: tokens, its end, or both. `error` comes with the reason "error".

    `logprobs` and `top` have an entry for each token, of requests that ask for them; the most likely tokens come first.
    `prompt` comes with the first tokens of a request that asks for it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt: PromptScores | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


OnAnswer = Callable[[Answer], None]
OnLost = Callable[[str], None]  # why no more answers come


class Link(Protocol):
    """One thread at a time calls `on_answer`; it must be quick. Any thread may call the methods.

    `refused` are sampling parameters that it cannot carry, with what is expected instead.
    """

    refused: Mapping[str, str]

    def start(self, on_answer: OnAnswer, on_lost: OnLost) -> None:
        """Begin to listen."""
        ...

    def send(self, request_id: str, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        """Start a request; `sampling.trtllm_params` makes `params`. Raises OSError if the link is lost."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request soon; its last answers may still come."""
        ...

    def close(self) -> None:
        """End everything; no answer comes after it."""
        ...


def finish_reason(word: str | None) -> FinishReason | None:
    """Finish reason for TensorRT-LLM's word, or for a word of its OpenAI server."""
    reasons: tuple[FinishReason, ...] = get_args(FinishReason)
    return None if word is None else next((reason for reason in reasons if reason == word), "error")
