"""Conversations of a measurement and records of their requests. Knows no protocol and no HTTP client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A prompt (text or token ids), or messages turn by turn, each sent after the previous answer.

    `fields` are further fields of its requests.
    """

    prompt: str | Sequence[int] | None = None
    turns: tuple[tuple[Message, ...], ...] = ()
    category: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return 1 if self.prompt is not None else len(self.turns)

    def prompt_after(self, answers: Sequence[str]) -> str | Sequence[int] | Mapping[str, Any]:
        """The prompt of an engine, at the turn after `answers`."""
        return {"messages": self.messages(answers), **self.fields} if self.prompt is None else self.prompt

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The conversation up to the turn after `answers`."""
        said = [{"role": "assistant", "content": answer} for answer in answers]
        spoken = [message for turn, answer in zip(self.turns, said, strict=False) for message in (*turn, answer)]
        return [*spoken, *self.turns[len(answers)]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """A request. Times are from `time.perf_counter`; `content_s` are the times of its events with text.

    `speculation` is `metrics.speculative_decoding` of the answer's root (vLLM's and aiperf's words), if present.
    """

    category: str | None
    started_s: float
    content_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    speculation: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def ended_s(self) -> float:
        return self.content_s[-1] if self.content_s else self.started_s

    @property
    def time_to_first_token_s(self) -> float:
        return self.content_s[0] - self.started_s

    @property
    def end_to_end_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """None of a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.ended_s - self.content_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between successive events, each of which has the tokens of a verify step."""
        return tuple(after - before for before, after in zip(self.content_s, self.content_s[1:], strict=False))
