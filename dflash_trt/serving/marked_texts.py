"""A text by where its tokens come from: drafts that were accepted, drafts that were rejected, the target itself."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.core.request import GenerationOutput, TokenEvent, verified_drafts
from dflash_trt.serving.text import TextCodec

Origin = Literal["target", "accepted", "rejected"]

_MAX_CHARACTER_TOKENS = 4  # no character has more bytes


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Text of one origin; without the rejected ones, the texts of an output join to its text and any stop string."""

    text: str
    origin: Origin

    @property
    def shown(self) -> str:
        """Rejected text stays on its line: its line breaks, with the indentation after them, become signs."""
        return re.sub(r"\n[ \t]*", "\u23ce", self.text) if self.origin == "rejected" else self.text


def marked_texts(output: GenerationOutput, codec: TextCodec) -> Iterator[MarkedText]:
    """The texts of a request that `reports_drafts`, step by step, none of them empty."""
    marker = DraftMarker(codec)
    yield from marker.push(output.steps)
    yield from marker.flush()


class DraftMarker:
    """Marks the text of one request as its steps come.

    A step has its accepted drafts, then the drafts that the target rejected, then the target's own token in place of
    the first of these: the bonus token. A character of several tokens counts as the last one's.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer()
        self._last_step = TokenEvent("", ())
        self._last_token_ids: tuple[int, ...] = ()

    def push(self, steps: Iterable[TokenEvent]) -> Iterator[MarkedText]:
        """The texts that these steps complete."""
        for step in steps:
            yield from self.mark(step.token_ids, verified_drafts(self._last_step, step), step.num_accepted)
            self._last_step = step

    def mark(self, token_ids: Sequence[int], drafts: Sequence[int], num_accepted: int) -> Iterator[MarkedText]:
        """The texts of one step, which verified `drafts`."""
        num_accepted = min(num_accepted, len(token_ids))  # a stop may have cut the tokens
        accepted, own = tuple(token_ids[:num_accepted]), tuple(token_ids[num_accepted:])
        yield from _if_any(self._detokenizer.push(accepted), "accepted")
        self._remember(accepted)
        if own:
            yield from _if_any(self._text_after_last(drafts[num_accepted:]), "rejected")
            yield from _if_any(self._detokenizer.push(own), "target")
            self._remember(own)

    def flush(self) -> Iterator[MarkedText]:
        """The rest of the text, at the end."""
        yield from _if_any(self._detokenizer.flush(), "target")

    def _remember(self, token_ids: tuple[int, ...]) -> None:
        self._last_token_ids = (self._last_token_ids + token_ids)[-_MAX_CHARACTER_TOKENS:]

    def _text_after_last(self, token_ids: Sequence[int]) -> str:
        """The tokens before say whether it begins with a space, or within a character."""
        detokenizer = self._codec.detokenizer()
        detokenizer.push(self._last_token_ids)
        return detokenizer.push(token_ids) + detokenizer.flush()


def _if_any(text: str, origin: Origin) -> Iterator[MarkedText]:
    if text:
        yield MarkedText(text, origin)
