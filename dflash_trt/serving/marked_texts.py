"""A text by where its tokens come from: drafts that were accepted, drafts that were rejected, the target itself."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.core.request import GenerationOutput
from dflash_trt.serving.text import TextCodec

Origin = Literal["target", "accepted", "rejected"]


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
    """The texts of a request that `reports_drafts`, step by step, none of them empty.

    A step has its accepted drafts, then the drafts that the target refused, then the target's own token in place of the
    first of these. A character of several tokens counts as the last one's.
    """
    return (text for text in _texts(output, codec) if text.text)


def _texts(output: GenerationOutput, codec: TextCodec) -> Iterator[MarkedText]:
    detokenizer = codec.detokenizer()
    drafts: Sequence[int] = ()
    before: Sequence[int] = ()  # the last token, which says whether a text begins with a space
    for event in output.steps:
        num_accepted = min(event.num_accepted, len(event.token_ids))
        accepted, own = event.token_ids[:num_accepted], event.token_ids[num_accepted:]
        yield MarkedText(detokenizer.push(accepted), "accepted")
        if own:
            verified = event.ngram_draft_token_ids or drafts
            rejected = verified[event.num_accepted : event.num_candidates]
            yield MarkedText(_text_after(codec, (accepted or before)[-1:], rejected), "rejected")
        yield MarkedText(detokenizer.push(own), "target")
        before, drafts = event.token_ids, event.draft_token_ids
    yield MarkedText(detokenizer.flush(), "target")


def _text_after(codec: TextCodec, before: Sequence[int], token_ids: Sequence[int]) -> str:
    detokenizer = codec.detokenizer()
    detokenizer.push(before)
    return detokenizer.push(token_ids) + detokenizer.flush()
