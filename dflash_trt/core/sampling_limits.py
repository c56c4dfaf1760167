"""Limits of sampling parameters that bound what a request costs, and values that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from dflash_trt.core.errors import problem

if TYPE_CHECKING:
    from dflash_trt.core.sampling import SamplingParams

MAX_STOP_STRINGS: Final = 64
MAX_STOP_LEN: Final = 256  # characters of one stop string
MAX_BAD_WORDS: Final = 64
MAX_LOGIT_BIASES: Final = 512
MAX_GRAMMAR_LEN: Final = 2**20  # characters of a schema, an expression, a grammar or all choices
GRAMMAR_FIELDS: Final = ("json_schema", "regex", "choice", "grammar")


def sampling_problems(params: SamplingParams) -> Iterator[str]:
    """Problems of values that are right one by one."""
    yield from _size_problems(params)
    yield from _logprobs_problems(params)
    yield from _grammar_problems(params)


def _logprobs_problems(params: SamplingParams) -> list[str]:
    if not params.top_logprobs or params.logprobs:
        return []
    found, hint = f"{params.top_logprobs}", "Set logprobs as well."
    return [problem("sampling top_logprobs", expected="0 without logprobs", found=found, hint=hint)]


def _size_problems(params: SamplingParams) -> Iterator[str]:
    """Size limits: an engine thread scans all text for stop strings, a device all rules at every row."""
    for name, texts, max_num in (
        ("stop", params.stop, MAX_STOP_STRINGS),
        ("bad_words", params.bad_words, MAX_BAD_WORDS),
    ):
        longest = max(map(len, texts), default=0)
        yield from _too_many(name, len(texts), max_num, "strings")
        yield from _too_many(name, longest, MAX_STOP_LEN, "characters in a string")
    if params.min_tokens > params.max_new_tokens:
        yield problem(
            "sampling min_tokens",
            expected=f"at most max_new_tokens {params.max_new_tokens}",
            found=str(params.min_tokens),
            hint="Raise max_new_tokens, or lower min_tokens.",
        )


def _too_many(name: str, found: int, limit: int, what: str) -> Iterator[str]:
    if found > limit:
        yield problem(f"sampling {name}", expected=f"at most {limit} {what}", found=str(found))


def given_grammars(params: SamplingParams) -> list[str]:
    return [name for name in GRAMMAR_FIELDS if getattr(params, name)]


def _grammar_problems(params: SamplingParams) -> list[str]:
    given = given_grammars(params)
    if len(given) > 1:
        expected, hint = f"at most one of {', '.join(GRAMMAR_FIELDS)}", "Leave out all but one."
        return [problem("sampling", expected=expected, found=" and ".join(given), hint=hint)]
    sizes = {name: sum(map(len, getattr(params, name))) for name in given}
    return [
        problem(f"sampling {name}", expected=f"at most {MAX_GRAMMAR_LEN} characters", found=str(size))
        for name, size in sizes.items()
        if size > MAX_GRAMMAR_LEN
    ]
