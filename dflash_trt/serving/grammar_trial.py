"""Try constraints outside the engine: hostile input may crash a compiler, or exhaust time or memory.

Runs in a process of its own, `grammar_worker.py`, with less stack than any thread of the engine has. What llguidance
compiled cannot leave a process, so the engine compiles constraints that pass a second time.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# White space between two tokens of JSON, for schemas without options of their own; without a limit a model may write it
# until max_new_tokens.
_JSON_OPTIONS: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
# Limits of one mask or token. The time per item grows with the number of grammar rules that apply at one place.
_LIMITS: Final = LLParserLimits(step_max_items=10_000, verbose_errors=False)

NUM_TOKENS: Final = 16  # tokens of text that a trial writes
MAX_STEP_S: Final = 0.25  # processor time of one token of it, mask included


def compiled(tokens: LLTokenizer, field: str, text: str) -> LLMatcher:
    """The matcher of a field of SamplingParams; it may be in error.

    Raises:
        ValueError, RecursionError: a JSON schema that is no JSON, or nested too deeply.
    """
    return LLMatcher(tokens, _source(field, text), log_level=0, limits=_LIMITS)


def problem_of(tokens: LLTokenizer, end_id: int, field: str, text: str) -> str | None:
    """Compile a constraint and write a random text of it; why it cannot be used."""
    try:
        matcher = compiled(tokens, field, text)
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    if matcher.is_error():
        return message(matcher.get_error())
    draw = random.Random(0)
    for num_tokens in range(NUM_TOKENS):
        started = time.process_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return message(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        allowed = allowed[allowed != end_id]
        if not len(allowed):
            break
        token = int(draw.choice(allowed))
        if matcher.try_consume_tokens([token]) == 0 and not matcher.is_error():
            break
        if matcher.is_error():
            return message(matcher.get_error())
        if time.process_time() - started > MAX_STEP_S:
            return f"one that takes more than {MAX_STEP_S:g} s for token {num_tokens} of a text"
        if matcher.is_stopped():
            break
    return None


def message(error: str) -> str:
    """llguidance's words without the parser's state, on one line."""
    words = " ".join(error.partition("\n<state>")[0].replace("<non-verbose/>", "").split())
    if words.startswith("NoExtension"):
        return "one that no text matches"
    return words if len(words) <= 1000 else words[:1000] + " ..."


def _source(field: str, text: str) -> str:
    """The grammar in the language of llguidance."""
    if field == "json_schema":
        own = json.loads(text).get("x-guidance")  # llguidance's options in the schema itself
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS if own is None else None)
    if field == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(choice_grammar(json.loads(text)) if field == "choice" else text)


def schema_with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema that names the options of ours, unless it has its own: for an llguidance without our defaults."""
    return schema if schema.get("x-guidance") is not None else {**schema, "x-guidance": _JSON_OPTIONS}


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of these texts, in llguidance's syntax."""
    return f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}"
