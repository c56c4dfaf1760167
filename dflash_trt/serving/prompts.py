"""Conversion of a caller's prompts into token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from dflash_trt.core.chat_template_options import ChatMessage, reserved_problems
from dflash_trt.core.errors import RequestError
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.request import check_token_ids, too_many_tokens

if TYPE_CHECKING:  # tokenizers is loaded only for an engine with one
    from dflash_trt.serving.text import TextCodec

# Text, token ids (a list, or an array of numpy), or one of {"prompt": text}, {"messages": [...]},
# {"prompt_token_ids": [...]}. Messages may come with {"chat_template_kwargs": {...}}, variables of the chat template.
Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = ("prompt", "messages", "prompt_token_ids")
KWARGS_KEY = "chat_template_kwargs"


class PromptReader:
    """Reads prompts; without `codec` (an engine without tokenizer), token ids only.

    A prompt of more than `max_tokens` is refused, before it is tokenized if its length alone says so.
    """

    def __init__(self, codec: TextCodec | None, *, vocab_size: int, max_tokens: int | None = None) -> None:
        self._codec = codec
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens

    def read(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids, each in the vocabulary, at least one.

        Raises:
            RequestError: the prompt is of another shape, empty, too long, or needs a tokenizer that is not there.
        """
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise RequestError.about("prompt", expected="at least 1 token", found="0", hint="Pass a prompt.")
        if self._max_tokens is not None and len(token_ids) > self._max_tokens:
            raise too_many_tokens(len(token_ids), self._max_tokens)
        check_token_ids(token_ids, self._vocab_size)
        return tuple(map(int, token_ids))  # NumPy integers would not go into JSON

    @property
    def max_text_bytes(self) -> int | None:
        """Limit of a text prompt; None means no limit."""
        if self._codec is None or self._max_tokens is None:
            return None
        return self._codec.max_text_bytes(self._max_tokens)

    def _token_ids(self, prompt: Prompt) -> Sequence[Any]:
        if isinstance(prompt, str):
            codec = self._needed_codec("a text prompt")
            return codec.encode(prompt, max_tokens=self._max_tokens) if prompt else ()
        if not isinstance(prompt, Mapping):
            return _sequence(prompt, "prompt")
        key = _checked_key(prompt)
        return self._by_key(key, prompt[key], prompt.get(KWARGS_KEY) or {})

    def _by_key(self, key: str, value: Any, template_kwargs: Mapping[str, Any]) -> Sequence[Any]:
        if key == "prompt_token_ids":
            return _sequence(value, key)
        if key == "messages":
            messages = _sequence(value, key)
            if not messages or not all(isinstance(message, Mapping) for message in messages):
                raise RequestError.about(
                    "messages",
                    expected='a list of objects like {"role": "user", "content": "..."}',
                    found=f"{value!r:.80}",
                    hint="Pass at least one message.",
                )
            codec = self._needed_codec("a chat prompt")
            return codec.encode_chat(messages, template_kwargs, max_tokens=self._max_tokens)
        if not isinstance(value, str):
            raise RequestError.about(
                "prompt", expected="a string", found=type(value).__name__, hint="Pass token ids as a list."
            )
        return self._token_ids(value)

    def _needed_codec(self, what: str) -> TextCodec:
        if self._codec is None:
            raise RequestError.about(
                "prompt",
                expected="token ids, for this engine has no tokenizer",
                found=what,
                hint="Pass prompt_token_ids, or build the engine from a target directory with a tokenizer.",
            )
        return self._codec


class TemplateOptions(TypedDict, total=False):
    """Beside the messages of a conversation."""

    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None


def conversation(messages: Sequence[ChatMessage], **options: Unpack[TemplateOptions]) -> Prompt:
    """The prompt of one conversation; to a template, tools are one more variable."""
    kwargs = dict(options.get("chat_template_kwargs") or {})
    if options.get("tools") is not None:
        kwargs["tools"] = options["tools"]
    return {"messages": messages, KWARGS_KEY: kwargs} if kwargs else {"messages": messages}


def conversations(
    messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]], **options: Unpack[TemplateOptions]
) -> Prompt | list[Prompt]:
    """The prompt of a list of messages, or the prompts of a list of such lists."""
    if messages and not isinstance(messages[0], Mapping):
        return [conversation(each, **options) for each in cast(Sequence[Sequence[ChatMessage]], messages)]
    return conversation(cast(Sequence[ChatMessage], messages), **options)


def _sequence(value: Any, name: str) -> Sequence[Any]:
    """A list, a tuple or an array."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | Set):
        with suppress(TypeError):  # an array without axes raises it
            return list(value)
    raise RequestError.about(
        name, expected="a list", found=type(value).__name__, hint="Pass text, token ids or messages."
    )


def check_template_kwargs(value: Any) -> None:
    """Raises RequestError: not an object of options for a chat template."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        expected, hint = "an object", 'Pass names and values, {"enable_thinking": false} for example.'
        raise RequestError.about(KWARGS_KEY, expected=expected, found=f"{value!r:.80}", hint=hint)
    for reason in reserved_problems(value, KWARGS_KEY):
        raise RequestError(reason)


def _checked_key(prompt: Mapping[str, Any]) -> str:
    """The key of the prompt itself. Raises RequestError."""
    keys = [key for key in _KEYS if prompt.get(key) is not None]
    unknown = [name for name in map(str, prompt) if name not in (*_KEYS, KWARGS_KEY)]
    if len(keys) != 1:
        raise RequestError.about(
            "prompt",
            expected=f"exactly one of {', '.join(_KEYS)}",
            found=", ".join(keys) or ", ".join(map(str, prompt)) or "an empty object",
            hint="Pass one of them.",
        )
    if unknown:
        nearest = nearest_name(unknown[0], (*_KEYS, KWARGS_KEY))
        hint = f"Did you mean '{nearest}'?" if nearest else "Leave it out."
        raise RequestError.about("prompt", expected="known keys", found=f"'{unknown[0]}'", hint=hint)
    if prompt.get(KWARGS_KEY) is not None:
        check_template_kwargs(prompt[KWARGS_KEY])
        if keys != ["messages"]:
            expected, hint = "with messages only", "Leave it out, or pass messages."
            raise RequestError.about(KWARGS_KEY, expected=expected, found=f"with {keys[0]}", hint=hint)
    return keys[0]
