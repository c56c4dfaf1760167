"""Text to token ids and back, with the tokenizer an engine directory carries."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.core.chat_template_options import ChatMessage, ChatTemplateOptions
from dflash_trt.core.errors import EngineDirError, RequestError
from dflash_trt.core.request import too_many_tokens
from dflash_trt.engine_dir.stored_tokenizer import StoredTokenizer
from dflash_trt.engine_dir.template_renderer import TemplateRenderer, text_too_long
from dflash_trt.serving.detokenizer import Detokenizer, make_detokenizers
from dflash_trt.serving.token_bytes import longest_token_bytes, max_bytes_per_token

# The class of a panic in the tokenizers library (Rust): not an Exception, and not exported.
_PANIC = "pyo3_runtime.PanicException"

# Bytes of a text whose tokens may stand for more than they spell: see `max_text_bytes`.
_MIN_DOUBTFUL_BYTES = 1024**2
_DOUBTFUL_FACTOR = 16


class TextCodec:
    """A tokenizer as requests see it. Thread-safe once constructed: nothing in it changes."""

    def __init__(self, tokenizer: StoredTokenizer, *, chat_template_options: ChatTemplateOptions | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_template_options = dict(chat_template_options or {})  # for conversations without options of their own
        self._backend = tokenizer.backend
        self._renderer = TemplateRenderer()
        description = json.loads(self._backend.to_str())
        normalizer = self._backend.normalizer
        self._bytes_per_token = max_bytes_per_token(description, normalizer.normalize_str if normalizer else str)
        self._longest_token_bytes = longest_token_bytes(description)
        self._detokenizer = make_detokenizers(description["decoder"], self._backend, self.decode)

    @classmethod
    def open(cls, path: str | Path, *, chat_template_options: ChatTemplateOptions | None = None) -> "TextCodec":
        """Load the tokenizer files in `path`; nothing is fetched and no code of theirs is run.

        Raises:
            EngineDirError: the directory holds no tokenizer that can be loaded.
        """
        path = Path(path)
        try:
            return cls(StoredTokenizer.open(path), chat_template_options=chat_template_options)
        except Exception as error:  # the library of tokenizers raises whatever its parsers raise
            raise EngineDirError.about(
                f"tokenizer {path}",
                expected="tokenizer.json and tokenizer_config.json that transformers can load",
                found=f"{type(error).__name__}: {error}",
                hint="Build the engine again from a checkpoint with a fast tokenizer.",
            ) from error

    @property
    def backend(self) -> Any:
        """The Tokenizer of the tokenizers library; not to be changed."""
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_templates)

    def start_renderer(self) -> None:
        """Save the first conversation the start of the process that renders it."""
        if self.has_chat_template:
            self._renderer.start()

    def max_text_bytes(self, max_tokens: int) -> int:
        """A longer text has more than `max_tokens` tokens.

        With a tokenizer that may drop text (white space for example) nothing says how long a text may be; the limit is
        then a lavish one.
        """
        if self._bytes_per_token is not None:
            return max_tokens * self._bytes_per_token
        return max(_MIN_DOUBTFUL_BYTES, max_tokens * self._longest_token_bytes * _DOUBTFUL_FACTOR)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the model expects around one (often a BOS).

        Raises:
            RequestError: the text cannot be tokenized, or has more than `max_tokens` tokens.
        """
        return self._encode(text, max_tokens=max_tokens, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, by the tokenizer's chat template.

        `template_kwargs` replace `chat_template_options` by name.

        Raises:
            RequestError: there is no template, it does not take these messages, it takes too long, or there are more
                than `max_tokens` tokens.
        """
        if not self.has_chat_template:
            raise RequestError.about(
                "chat prompt",
                expected="a tokenizer with a chat template",
                found="none",
                hint="Pass a text prompt, or build the engine from a checkpoint with a chat template.",
            )
        options = {**self.chat_template_options, **(template_kwargs or {})}
        text = self._render(messages, options, max_tokens)
        return self._encode(text, max_tokens=max_tokens, add_special_tokens=False)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a word with and without a leading space, as at the start of and inside a text.

        Raises:
            RequestError: the tokenizer makes no tokens of it.
        """
        stem = word.lstrip(" ") or word
        found = {tuple(self._encode(text, max_tokens=None, add_special_tokens=False)) for text in (stem, f" {stem}")}
        if () in found:
            hint = "Leave it out."
            raise RequestError.about("sampling bad_words", expected="words with tokens", found=repr(word), hint=hint)
        return sorted(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, special tokens left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """For one request's tokens, as they come."""
        return self._detokenizer()

    def _render(self, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any], max_tokens: int | None) -> str:
        """Render a conversation, as transformers' `apply_chat_template` does."""
        try:
            template = self._tokenizer.chat_template(has_tools=kwargs.get("tools") is not None)
            variables = {**self._tokenizer.special_tokens, **kwargs}
            if any(map(callable, variables.get("tools") or ())):
                variables["tools"] = list(map(_schema, variables["tools"]))
        except Exception as error:  # transformers raises whatever its parsers raise
            found = f"{type(error).__name__}: {error}"
            expected, hint = "template options that transformers takes", "Correct them."
            raise RequestError.about("chat prompt", expected=expected, found=found, hint=hint) from error
        max_bytes = None if max_tokens is None else self.max_text_bytes(max_tokens)
        return self._renderer.render(template, messages, variables, max_bytes=max_bytes)

    def _encode(self, text: str, *, max_tokens: int | None, add_special_tokens: bool) -> list[int]:
        _check_text(text, None if max_tokens is None else self.max_text_bytes(max_tokens))
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            if not isinstance(error, Exception) and f"{type(error).__module__}.{type(error).__name__}" != _PANIC:
                raise
            found, hint = f"{type(error).__name__}: {error}", "Change or shorten it."
            raise RequestError.about(
                "prompt", expected="text that the tokenizer takes", found=found, hint=hint
            ) from error
        if max_tokens is not None and len(encoding) > max_tokens:
            raise too_many_tokens(len(encoding), max_tokens)
        return list(encoding.ids)


def _schema(tool: Any) -> Any:
    """The JSON schema of a Python function, which only a caller in this process can pass, by transformers."""
    if not callable(tool):
        return tool
    from transformers.utils.chat_template_utils import get_json_schema

    return get_json_schema(tool)


def _check_text(text: str, max_bytes: int | None) -> None:
    """Refuse long texts, and lone surrogates (undecodable command-line bytes), which no tokenizer takes."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError.about(
            "prompt", expected="valid Unicode text", found=str(error), hint="Pass text that UTF-8 can encode."
        ) from error
    if max_bytes is not None and num_bytes > max_bytes:
        raise text_too_long(num_bytes, max_bytes)
