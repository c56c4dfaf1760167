"""A request in the engine's terms: its token ids, the token ids of its words, its constraint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dflash_trt.core.checked_values import checked
from dflash_trt.core.constraint import TokenConstraint
from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.serving.generation_batch import SAMPLING
from dflash_trt.serving.prompts import Prompt, PromptReader

if TYPE_CHECKING:  # tokenizers and llguidance are loaded only where they are needed
    from dflash_trt.serving.grammar import GrammarCompiler
    from dflash_trt.serving.text import TextCodec

_NEED_TOKENIZER = {"stop": "Use stop_token_ids, or build", "bad_words": "Use logit_bias, or build"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRequest:
    """`bad_word_ids` has every spelling of the words."""

    prompt_token_ids: tuple[int, ...]
    bad_word_ids: tuple[tuple[int, ...], ...]
    constraint: TokenConstraint | None


class RequestReader:
    """Reads with an engine's tokenizer, `codec`, if it has one. Needs no weights. Any thread may call it."""

    def __init__(self, codec: TextCodec | None, *, vocab_size: int, max_tokens: int | None = None) -> None:
        """`max_tokens` is the longest prompt."""
        self.codec = codec
        self._vocab_size = vocab_size
        self.prompts = PromptReader(codec, vocab_size=vocab_size, max_tokens=max_tokens)

    def read(self, prompt: Prompt, sampling: SamplingParams | None = None) -> ReadRequest:
        """Raise RequestError if the engine cannot take the prompt, or the tokens and texts of its parameters."""
        params = SamplingParams() if sampling is None else checked("sampling parameters", sampling, SAMPLING)
        for field in self._fields_without_tokenizer(params):
            raise RequestError.about(
                f"sampling {field}",
                expected="none, for this engine has no tokenizer",
                found=f"{getattr(params, field)!r:.80}",
                hint=f"{_NEED_TOKENIZER.get(field, 'Build')} the engine from a target directory with a tokenizer.",
            )
        return ReadRequest(
            prompt_token_ids=self.prompts.read(prompt),
            bad_word_ids=self._bad_word_ids(params),
            constraint=None if params.grammar_field is None else self._compiler.compile(params),
        )

    def _fields_without_tokenizer(self, sampling: SamplingParams) -> Iterator[str]:
        """Those that have a value and need the tokenizer that is not there."""
        if self.codec is None:
            yield from (field for field in _NEED_TOKENIZER if getattr(sampling, field))
            if sampling.grammar_field is not None:
                yield sampling.grammar_field

    def _bad_word_ids(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        beyond = [token for token, _ in sampling.logit_bias if token >= self._vocab_size]
        if beyond:
            expected, hint = f"token ids from 0 to {self._vocab_size - 1}", "Use the tokenizer of the target."
            raise RequestError.about("sampling logit_bias", expected=expected, found=str(beyond[0]), hint=hint)
        if self.codec is None:
            return ()
        return tuple(ids for word in sampling.bad_words for ids in self.codec.spellings(word))

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """llguidance is imported when the first request asks for it."""
        from dflash_trt.serving.grammar import GrammarCompiler

        assert self.codec is not None
        return GrammarCompiler(self.codec.backend, vocab_size=self._vocab_size)
