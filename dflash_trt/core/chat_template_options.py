"""Messages and options of chat templates, such as `enable_thinking`: variables of a template besides the messages.

A build stores its pair's options in the engine; a request's own options replace them by name.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dflash_trt.core.errors import ConfigError, problem, raise_all

ChatMessage = Mapping[str, Any]  # {"role": "user", "content": "..."}
ChatTemplateOptions = Mapping[str, Any]  # JSON values by name

# Parameters of transformers' `apply_chat_template`, and variables that the engine sets.
RESERVED_NAMES = frozenset(
    {
        "self",
        "conversation",
        "conversations",
        "messages",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
_BEGINNINGS_OF_JSON = ("{", "[", '"')
_WORDS_OF_PYTHON = {"true", "false", "none", "null"}  # in any case: text would count as true in a template


def options_from_words(words: Iterable[str], *, flag: str) -> dict[str, Any]:
    """NAME=VALUE each: a VALUE that is JSON has that meaning (false, 2, "2"), and any other is text.

    Raises:
        ConfigError: a word of another form or a reserved name, all of them in one error.
    """
    options: dict[str, Any] = {}
    problems = []
    for word in words:
        name, equals, text = word.partition("=")
        try:
            if not (name and equals):
                raise ValueError
            options[name] = _value(text)
        except (ValueError, RecursionError):
            hint = "Write enable_thinking=false or reasoning_effort=low, for example."
            problems.append(
                problem(flag, expected="NAME=VALUE, where VALUE is JSON or text", found=repr(word), hint=hint)
            )
    problems += reserved_problems(options, flag)
    raise_all(ConfigError, "chat template options", problems)
    return options


def reserved_problems(options: Iterable[str], subject: str) -> list[str]:
    """A problem if options have names that the engine decides itself."""
    reserved = sorted(RESERVED_NAMES.intersection(options))
    if not reserved:
        return []
    expected, found = "variables of the chat template", f"{', '.join(reserved)}, decided by the engine"
    return [problem(subject, expected=expected, found=found, hint="Leave them out.")]


def shown_options(options: ChatTemplateOptions) -> str:
    """As they are written on a command line: `enable_thinking=false, reasoning_effort="low"`."""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in options.items())


def _value(text: str) -> Any:
    """Raises ValueError for text that is almost JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)  # NaN and Infinity are not JSON
    except ValueError:
        if text.startswith(_BEGINNINGS_OF_JSON) or text.strip().lower() in _WORDS_OF_PYTHON:
            raise
        return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
