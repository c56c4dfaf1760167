"""Token ids to text, piece by piece, never half a character.

The pieces of a request joined together equal decoding all of its tokens at once. Special tokens give no text.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

# A byte-level vocabulary spells each byte as one printable character: printable Latin-1 as itself, the other 68
# bytes as the characters from U+0100 on (the GPT-2 alphabet).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# No character is longer than 4 bytes; a tail of more tokens than this that still does not decode never will.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """One per request."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: replacement characters for bytes that never became a character."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is a string of bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window of tokens again and emits what is new and complete.

    The window keeps the last piece's tokens in front, because what a token looks like may depend on its neighbour
    (a leading space, a run of byte tokens).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._emitted: list[int] = []  # the last piece's tokens
        self._held: list[int] = []  # tokens whose text is not complete

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        return self._take(is_final=len(self._held) > _MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._take(is_final=True)

    def _take(self, *, is_final: bool) -> str:
        before = self._decode(self._emitted)
        text = self._decode(self._emitted + self._held)
        is_incomplete = len(text) <= len(before) or text.endswith(_REPLACEMENT)
        if is_incomplete and not is_final:
            return ""
        self._emitted, self._held = self._held, []
        return text[len(before) :]


def byte_alphabet() -> dict[str, int]:
    """Character of a byte-level vocabulary -> byte."""
    others = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
    alphabet = {chr(byte): byte for byte in _PRINTABLE}
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet


def bytes_of_piece(piece: str, alphabet: dict[str, int]) -> bytes:
    """The bytes of one vocabulary entry; an entry outside the alphabet (an added token) stands for itself."""
    try:
        return bytes(alphabet[character] for character in piece)
    except KeyError:
        return piece.encode()
