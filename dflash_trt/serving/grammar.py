"""Structured output: what requests say of their texts, compiled by llguidance with the tokenizer of an engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cache
from threading import Lock
from typing import Any, Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from dflash_trt.core.constraint import ConstraintError, MaskedBlock
from dflash_trt.core.errors import RequestError
from dflash_trt.core.sampling import SamplingParams

_END: Final = "<|end of the constraint|>"  # a token that no model has: it stands where a text may end
# White space between two tokens of JSON, for schemas without options of their own; without a limit a model may write it
# until max_new_tokens.
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_MAX_COMPILED: Final = 256


class GrammarCompiler:
    """Compiles for one engine. Any thread may call it; the first call reads the tokenizer, about a second for 150k."""

    def __init__(self, tokenizer: Any, *, vocab_size: int) -> None:
        """`tokenizer` is a Tokenizer of the tokenizers library."""
        self._backend = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[tuple[str, str], Grammar] = {}  # the one used last at the end
        self._lock = Lock()  # of the two above

    def compile(self, sampling: SamplingParams) -> Grammar:
        """Of parameters that have a `grammar_field`.

        Raises:
            RequestError: what they ask for is wrong, or not implemented by llguidance.
        """
        field = sampling.grammar_field
        assert field is not None
        text = json.dumps(sampling.choice) if field == "choice" else str(getattr(sampling, field))
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._backend, self._vocab_size)
            grammar = self._compiled.pop((field, text), None)
        grammar = grammar or Grammar(self._vocabulary, field, text)
        with self._lock:
            self._compiled[field, text] = grammar
            if len(self._compiled) > _MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        return grammar


class Vocabulary:
    """An engine's tokens as llguidance knows them, with one more for the end."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        with_end = type(tokenizer).from_str(tokenizer.to_str())
        with_end.add_special_tokens([_END])
        self.size = vocab_size
        self.end_id: int = with_end.token_to_id(_END)
        num_ids = max(vocab_size, self.end_id + 1)
        try:
            self.tokens = LLTokenizer(with_end.to_str(), n_vocab=num_ids, eos_token=self.end_id)
        except Exception as error:  # whatever the library raises
            raise RequestError.about(
                "structured output",
                expected="a tokenizer that llguidance reads: byte-level, or with byte fallback",
                found=f"{type(error).__name__}: {error}",
                hint="Ask for unconstrained text.",
            ) from error
        self.num_words = -(-num_ids // 32)


class Grammar:
    """Implements TokenConstraint."""

    def __init__(self, vocabulary: Vocabulary, field: str, text: str) -> None:
        """Raises RequestError."""
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokens, _source(field, text), log_level=0)
        if self._matcher.is_error():
            raise RequestError.about(
                f"sampling {field}",
                expected="one that llguidance compiles",
                found=_message(self._matcher.get_error()),
                hint="Correct it, or leave out what is not implemented.",
            )

    def start(self, stop_token_ids: Collection[int]) -> GrammarMatcher:
        stop_ids = frozenset(token for token in stop_token_ids if token < self._vocabulary.size)
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary, stop_ids)


class GrammarMatcher:
    """Implements TokenMatcher."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._is_finished = False
        self.num_mask_words = -(-vocabulary.size // 32)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        text_ids = self._text_of(token_ids)
        num_allowed = self._matcher.validate_tokens(text_ids)
        if num_allowed < len(text_ids) or len(text_ids) == len(token_ids):
            return num_allowed
        return num_allowed + self._may_end(text_ids)

    def advance(self, token_ids: Sequence[int]) -> int:
        num_taken = self._matcher.try_consume_tokens(list(token_ids))
        self._is_finished = self._matcher.is_stopped()
        if num_taken < len(token_ids) and not self._is_finished:
            if self._stop_ids or not self._may_end([]):
                reason = self._matcher.get_error() or f"token {token_ids[num_taken]}"
                raise ConstraintError(_message(reason))
            self._is_finished = True  # the only token that could follow was the end
        return num_taken

    @staticmethod
    def fill_masks(blocks: Sequence[MaskedBlock], bits: Any) -> None:
        matchers = [matcher for matcher, _ in blocks if isinstance(matcher, GrammarMatcher)]
        assert len(matchers) == len(blocks), "the constraints of an engine are of one kind"
        vocabulary = matchers[0]._vocabulary
        known = np.full((len(bits), vocabulary.num_words), -1, np.int32)
        alone, drafted, first = [], [], 0
        for matcher, block in zip(matchers, blocks, strict=True):
            text_ids = matcher._text_of(block.draft_tokens)
            if text_ids:
                drafted.append((matcher._matcher, first, text_ids))
            else:
                alone.append((matcher._matcher, first))
            first += block.num_rows
        if alone:
            fill_next_token_bitmask_par(_threads(), alone, known)
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(_threads(), drafted, known)
        may_end = _bit(known, vocabulary.end_id)
        bits[:] = known[:, : bits.shape[1]]
        if vocabulary.end_id < vocabulary.size:
            _set_bit(bits, slice(None), vocabulary.end_id, False)
        first = 0
        for matcher, block in zip(matchers, blocks, strict=True):
            rows = first + np.flatnonzero(may_end[first : first + block.num_rows])
            matcher._allow_stops(bits, rows)
            first += block.num_rows

    def _text_of(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first one that ends the request."""
        stops = (i for i, token in enumerate(token_ids) if token in self._stop_ids)
        return list(token_ids[: next(stops, None)])

    def _may_end(self, token_ids: list[int]) -> bool:
        return self._matcher.validate_tokens([*token_ids, self._vocabulary.end_id]) > len(token_ids)

    def _allow_stops(self, bits: Any, rows: Any) -> None:
        """Of rows where the text may end. Without a stop token, and nothing else to follow, any token ends it."""
        for token in self._stop_ids:
            _set_bit(bits, rows, token, True)
        if not self._stop_ids:
            bits[rows[~bits[rows].any(1)]] = -1


def _source(field: str, text: str) -> str:
    """The grammar in the language of llguidance."""
    if field == "json_schema":
        own = json.loads(text).get("x-guidance")  # llguidance's options in the schema itself
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS if own is None else None)
    if field == "regex":
        return LLMatcher.grammar_from_regex(text)
    if field == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    return LLMatcher.grammar_from_lark(text)


def _message(error: str) -> str:
    """llguidance's words without the parser's state, on one line."""
    return " ".join(error.partition("\n<state>")[0].split())


def _bit(bits: Any, token: int) -> Any:  # int32 [N, words] -> bool [N]
    return (bits[:, token // 32] >> (token % 32)) & 1 != 0


def _set_bit(bits: Any, rows: Any, token: int, value: bool) -> None:
    words = bits.view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[rows, token // 32] = words[rows, token // 32] | bit if value else words[rows, token // 32] & ~bit


@cache
def _threads() -> LLExecutor:
    """The threads that make masks, of all engines of the process."""
    return LLExecutor()
