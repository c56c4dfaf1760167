"""Structured output: the constraints of requests, compiled by llguidance with an engine's tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import mkstemp
from threading import Lock, local
from typing import Any, Final
from weakref import finalize

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par_with_draft_tokens

from dflash_trt.core.constraint import ConstraintError, MaskedBlock
from dflash_trt.core.errors import RequestError
from dflash_trt.core.limited_process import LimitedProcesses, ProcessEndedError
from dflash_trt.core.limited_worker import MAX_MEMORY_BYTES
from dflash_trt.core.sampling import SamplingParams
from dflash_trt.serving import grammar_worker
from dflash_trt.serving.grammar_trial import compiled, message
from dflash_trt.serving.mask_threads import TIME_LIMIT_S, LateError, MaskThreads

_END: Final = "<|end of the constraint|>"  # a token that no model has: it stands where a text may end
_OF_THREAD: Final = local()
_MAX_COMPILED: Final = 256
_TIME_LIMIT_S: Final = 4.0  # to compile a constraint


class GrammarCompiler:
    """Compiles grammars for one engine, from any thread.

    The first call reads the tokenizer: about a second for 150k tokens.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int) -> None:
        """`tokenizer` is a Tokenizer of the tokenizers library."""
        self._backend = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[tuple[str, str], Grammar] = {}  # the one used last at the end
        self._lock = Lock()  # guards the two above

    def compile(self, sampling: SamplingParams) -> Grammar:
        """Compile the constraint of parameters that have a `grammar_field`.

        Raises:
            RequestError: the constraint is wrong, or llguidance does not implement it.
        """
        field = sampling.grammar_field
        assert field is not None
        text = json.dumps(sampling.choice) if field == "choice" else str(getattr(sampling, field))
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._backend, self._vocab_size)
            grammar = self._compiled.pop((field, text), None)
        if grammar is None:
            self._vocabulary.try_out(field, text)
            grammar = Grammar(self._vocabulary, field, text)
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
        descriptor, path = mkstemp(prefix="dflash-trt-tokenizer-", suffix=".json")
        finalize(self, Path(path).unlink, missing_ok=True)
        with open(descriptor, "w") as file:
            file.write(with_end.to_str())
        arguments = (grammar_worker.__file__, path, str(num_ids), str(self.end_id))
        self._trials = LimitedProcesses(*arguments, time_limit_s=_TIME_LIMIT_S)
        self._trials.start()  # it reads the tokenizer, too, at the same time
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

    def try_out(self, field: str, text: str) -> None:
        """Raises RequestError: a constraint crashed, broke a limit or allows no text in a process of its own."""
        try:
            problem = self._trials.ask(json.dumps([field, text]).encode()).decode()
        except ProcessEndedError as error:
            megabytes = MAX_MEMORY_BYTES // 1024**2
            expected = f"one that llguidance compiles within {_TIME_LIMIT_S:g} s and {megabytes} MiB, without a crash"
            raise _refused(field, expected, str(error)) from error
        if problem:
            raise _refused(field, "one that llguidance compiles", problem)


class Grammar:
    """Implements TokenConstraint."""

    def __init__(self, vocabulary: Vocabulary, field: str, text: str) -> None:
        """Raises RequestError."""
        self._vocabulary = vocabulary
        self._matcher = compiled(vocabulary.tokens, field, text)
        if self._matcher.is_error():
            raise _refused(field, "one that llguidance compiles", message(self._matcher.get_error()))

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
        self._failure: str | None = None
        self.num_mask_words = -(-vocabulary.size // 32)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        if not token_ids or self._failure is not None:
            return 0
        (num_allowed,) = self._call_all({self: lambda: self._num_allowed(token_ids)})
        return num_allowed or 0

    def _num_allowed(self, token_ids: Sequence[int]) -> int:
        text_ids = self._text_of(token_ids)
        num_allowed = self._matcher.validate_tokens(text_ids)
        if num_allowed < len(text_ids) or len(text_ids) == len(token_ids):
            return num_allowed
        return num_allowed + self._may_end(text_ids)

    def advance(self, token_ids: Sequence[int]) -> int:
        num_taken: int | None = None
        if self._failure is None:
            (num_taken,) = self._call_all({self: lambda: self._advance(list(token_ids))})
        if num_taken is None or self._failure is not None:
            raise ConstraintError(self._failure)
        return num_taken

    def _advance(self, token_ids: list[int]) -> int:
        num_taken = self._matcher.try_consume_tokens(token_ids)
        if self._matcher.is_error():  # which counts as stopped, too
            raise ConstraintError(message(self._matcher.get_error()))
        self._is_finished = self._matcher.is_stopped()
        if num_taken < len(token_ids) and not self._is_finished:
            if self._stop_ids or not self._may_end([]):
                raise ConstraintError(f"token {token_ids[num_taken]}")
            self._is_finished = True  # the only token that could follow was the end
        return num_taken

    @classmethod
    def fill_masks(cls, blocks: Sequence[MaskedBlock], bits: Any) -> None:
        """A constraint that has failed allows every token: `advance` says so before any counts."""
        matchers = [matcher for matcher, _ in blocks if isinstance(matcher, GrammarMatcher)]
        assert len(matchers) == len(blocks), "the constraints of an engine are of one kind"
        vocabulary = matchers[0]._vocabulary
        known = np.full((len(bits), vocabulary.num_words), -1, np.int32)
        firsts = [0, *accumulate(block.num_rows for block in blocks)][:-1]
        calls = {
            matcher: partial(matcher._fill, block.draft_tokens, known, first)
            for matcher, block, first in zip(matchers, blocks, firsts, strict=True)
            if matcher._failure is None
        }
        cls._call_all(calls)
        may_end = _bit(known, vocabulary.end_id)
        bits[:] = known[:, : bits.shape[1]]
        if vocabulary.end_id < vocabulary.size:
            _set_bit(bits, slice(None), vocabulary.end_id, False)
        for matcher, block, first in zip(matchers, blocks, firsts, strict=True):
            if matcher._failure is None:
                matcher._allow_stops(bits, first + np.flatnonzero(may_end[first : first + block.num_rows]))
            else:
                bits[first : first + block.num_rows] = -1

    def _fill(self, draft_tokens: Sequence[int], known: Any, first: int) -> None:
        text_ids = self._text_of(draft_tokens)
        if text_ids:
            fill_next_token_bitmask_par_with_draft_tokens(_executor(), [(self._matcher, first, text_ids)], known)
        else:
            fill_next_token_bitmask(self._matcher, known, first)
        if self._matcher.is_error():
            raise ConstraintError(message(self._matcher.get_error()))

    @staticmethod
    def _call_all(calls: Mapping[GrammarMatcher, Callable[[], Any]]) -> list[Any]:
        """The results; None for a matcher that fails, which no call may touch any more."""
        if not calls:
            return []
        results = _threads().call_all(list(calls.values()))
        for matcher, result in zip(calls, results, strict=True):
            if isinstance(result, LateError):
                matcher._failure = f"one that takes more than {TIME_LIMIT_S:g} s for a token"
            elif isinstance(result, ConstraintError):
                matcher._failure = str(result)
            elif isinstance(result, Exception):
                raise result
        return [None if isinstance(result, Exception) else result for result in results]

    def _text_of(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first one that ends the request."""
        stops = (i for i, token in enumerate(token_ids) if token in self._stop_ids)
        return list(token_ids[: next(stops, None)])

    def _may_end(self, token_ids: list[int]) -> bool:
        return self._matcher.validate_tokens([*token_ids, self._vocabulary.end_id]) > len(token_ids)

    def _allow_stops(self, bits: Any, rows: Any) -> None:
        """Allow stop tokens in `rows`, where the text may end.

        Without stop tokens, any token ends a text that cannot go on.
        """
        for token in self._stop_ids:
            _set_bit(bits, rows, token, True)
        if not self._stop_ids:
            bits[rows[~bits[rows].any(1)]] = -1


def _refused(field: str, expected: str, found: str) -> RequestError:
    hint = "Correct or simplify it, or leave out what is not implemented."
    return RequestError.about(f"sampling {field}", expected=expected, found=found, hint=hint)


def _bit(bits: Any, token: int) -> Any:  # int32 [N, words] -> bool [N]
    return (bits[:, token // 32] >> (token % 32)) & 1 != 0


def _set_bit(bits: Any, rows: Any, token: int, value: bool) -> None:
    words = bits.view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[rows, token // 32] = words[rows, token // 32] | bit if value else words[rows, token // 32] & ~bit


def _threads() -> MaskThreads:
    """MaskThreads of the calling thread in this process: a forked child has none of its parent's threads."""
    if getattr(_OF_THREAD, "process_id", None) != os.getpid():
        _OF_THREAD.process_id, _OF_THREAD.threads = os.getpid(), MaskThreads()
    threads: MaskThreads = _OF_THREAD.threads
    return threads


def _executor() -> LLExecutor:
    """The calling thread's executor."""
    if not hasattr(_OF_THREAD, "executor"):
        _OF_THREAD.executor = LLExecutor(1)
    executor: LLExecutor = _OF_THREAD.executor
    return executor
