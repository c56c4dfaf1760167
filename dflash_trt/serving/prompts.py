"""What a caller may pass as a prompt, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt.core.errors import RequestError, problem

if TYPE_CHECKING:  # transformers is loaded only when there is a tokenizer
    from dflash_trt.serving.text import TextCodec

# Text, token ids, or one of {"prompt": text}, {"messages": [...]}, {"prompt_token_ids": [...]}.
Prompt = str | Sequence[int] | Mapping[str, Any]

_KEYS = ("prompt", "messages", "prompt_token_ids")


class PromptReader:
    """`codec` None: the engine has no tokenizer and takes token ids only."""

    def __init__(self, codec: TextCodec | None, *, vocab_size: int) -> None:
        self._codec = codec
        self._vocab_size = vocab_size

    def read(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids, each in the vocabulary, at least one.

        Raises:
            RequestError: the prompt is of another shape, empty, or needs a tokenizer that is not there.
        """
        token_ids = self._token_ids(prompt)
        if not token_ids:
            raise RequestError(problem("prompt", expected="at least 1 token", found="0", mend="Pass a prompt."))
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    problem(
                        "prompt token",
                        expected=f"an integer from 0 to {self._vocab_size - 1}",
                        found=repr(token_id),
                        mend="Encode the prompt with the tokenizer of the target.",
                    )
                )
        return tuple(token_ids)

    def _token_ids(self, prompt: Prompt) -> Sequence[Any]:
        if isinstance(prompt, str):
            return self._needed_codec("a text prompt").encode(prompt) if prompt else ()
        if not isinstance(prompt, Mapping):
            return _sequence(prompt, "prompt")
        keys = [key for key in _KEYS if prompt.get(key) is not None]
        if len(keys) != 1:
            raise RequestError(
                problem(
                    "prompt",
                    expected=f"exactly one of {', '.join(_KEYS)}",
                    found=", ".join(keys) or ", ".join(map(str, prompt)) or "an empty object",
                    mend="Pass one of them.",
                )
            )
        return self._by_key(keys[0], prompt[keys[0]], prompt.get("chat_template_options"))

    def _by_key(self, key: str, value: Any, template_options: Mapping[str, Any] | None) -> Sequence[Any]:
        if key == "prompt_token_ids":
            return _sequence(value, key)
        if key == "messages":
            messages = _sequence(value, key)
            if not messages or not all(isinstance(message, Mapping) for message in messages):
                raise RequestError(
                    problem(
                        "messages",
                        expected='a list of objects like {"role": "user", "content": "..."}',
                        found=f"{value!r:.80}",
                        mend="Pass at least one message.",
                    )
                )
            return self._needed_codec("a chat prompt").encode_chat(messages, template_options)
        if not isinstance(value, str):
            raise RequestError(
                problem("prompt", expected="a string", found=type(value).__name__, mend="Pass token ids as a list.")
            )
        return self._token_ids(value)

    def _needed_codec(self, what: str) -> TextCodec:
        if self._codec is None:
            raise RequestError(
                problem(
                    "prompt",
                    expected="token ids, for this engine has no tokenizer",
                    found=what,
                    mend="Pass prompt_token_ids, or build the engine from a target directory with a tokenizer.",
                )
            )
        return self._codec


def _sequence(value: Any, name: str) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return value
    raise RequestError(
        problem(name, expected="a list", found=type(value).__name__, mend="Pass text, token ids or messages.")
    )
