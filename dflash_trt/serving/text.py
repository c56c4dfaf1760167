"""Text to token ids and back, with the tokenizer an engine directory carries."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dflash_trt.core.errors import EngineDirError, RequestError, problem
from dflash_trt.engine_dir.tokenizer_dir import load_tokenizer
from dflash_trt.serving.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    byte_alphabet,
    bytes_of_piece,
)

ChatMessage = Mapping[str, Any]


class TextCodec:
    """A tokenizer as requests see it. Thread-safe once constructed: nothing in it changes."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        backend = tokenizer.backend_tokenizer
        decoder = json.loads(backend.to_str())["decoder"] or {}
        self._is_byte_level = decoder.get("type") == "ByteLevel"
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        alphabet = byte_alphabet()

        @cache
        def bytes_of(token_id: int) -> bytes:
            piece = None if token_id in self._special_ids else backend.id_to_token(token_id)
            return b"" if piece is None else bytes_of_piece(piece, alphabet)

        self._bytes_of = bytes_of

    @classmethod
    def open(cls, path: str | Path) -> "TextCodec":
        """Load the tokenizer files in `path`; nothing is fetched and no code of theirs is run.

        Raises:
            EngineDirError: the directory holds no tokenizer that transformers can load.
        """
        path = Path(path)
        try:
            return cls(load_tokenizer(path))
        except Exception as error:  # transformers raises whatever its parsers raise
            raise EngineDirError(
                problem(
                    f"tokenizer {path}",
                    expected="tokenizer.json and tokenizer_config.json that transformers can load",
                    found=f"{type(error).__name__}: {error}",
                    mend="Build the engine again from a checkpoint with a fast tokenizer.",
                )
            ) from error

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the model expects around one (often a BOS)."""
        return list(self._tokenizer.encode(_checked(text)))

    def encode_chat(
        self, messages: Sequence[ChatMessage], template_options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, by the tokenizer's chat template.

        Raises:
            RequestError: there is no template, or it does not take these messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                problem(
                    "chat prompt",
                    expected="a tokenizer with a chat template",
                    found="none",
                    mend="Pass a plain prompt, or build the engine from a checkpoint that has one.",
                )
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **(template_options or {}),
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(
                problem(
                    "chat prompt",
                    expected="messages that the chat template takes, each with a role and a content",
                    found=f"{type(error).__name__}: {error}",
                    mend="Change the messages.",
                )
            ) from error
        return list(self._tokenizer.encode(_checked(text), add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens at once, special tokens left out."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def detokenizer(self) -> Detokenizer:
        """For one request's tokens, as they come."""
        return ByteDetokenizer(self._bytes_of) if self._is_byte_level else WindowDetokenizer(self.decode)


def _checked(text: str) -> str:
    """Refuse lone surrogates, which no tokenizer takes: they come from undecodable bytes on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            problem("prompt", expected="valid Unicode text", found=str(error), mend="Pass text that UTF-8 can encode.")
        ) from error
    return text
