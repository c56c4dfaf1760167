"""Token ids to text, piece by piece, never half a character.

The pieces of a request joined together equal decoding all of its tokens at once. Special tokens give no text.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

# A byte-level vocabulary spells each byte as one printable character: printable Latin-1 as itself, the other 68
# bytes as the characters from U+0100 on (the GPT-2 alphabet).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# No character is longer than 4 bytes; a tail of more tokens than this that still does not decode never will.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """One per request."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is incomplete.

        How tokens are grouped into calls changes only how the text is split.
        """
        ...

    def held(self) -> str:
        """Complete characters that `push` holds back because later tokens may still change them."""
        ...

    def flush(self) -> str:
        """The remaining text at the end: replacement characters for bytes of incomplete characters."""
        ...


def make_detokenizers(
    decoder: Mapping[str, Any] | None, backend: Any, decode: Callable[[Sequence[int]], str]
) -> Callable[[], Detokenizer]:
    """The factory of detokenizers for a decoder of tokenizer.json: of its kind, or the general one."""
    special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    alphabet = byte_alphabet()
    fallback = ByteFallbackDecoder.of(decoder)

    def spelled(token_id: int) -> str | None:
        """None for tokens that give no text."""
        return None if token_id in special_ids else backend.id_to_token(token_id)

    @cache
    def bytes_of(token_id: int) -> bytes:
        piece = spelled(token_id)
        return b"" if piece is None else bytes_of_piece(piece, alphabet)

    if decoder is not None and decoder["type"] == "ByteLevel":
        return lambda: ByteDetokenizer(bytes_of)
    if fallback is not None:
        piece_of = cache(lambda token_id: fallback.piece(spelled(token_id)))
        return lambda: ByteFallbackDetokenizer(piece_of, num_stripped=fallback.num_stripped)
    return lambda: WindowDetokenizer(decode, has_text=lambda token_id: spelled(token_id) is not None)


class ByteDetokenizer:
    """For byte-level vocabularies, where a token is a string of bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def held(self) -> str:
        return ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """For vocabularies that spell what they lack as byte tokens, `<0xE4>`.

    Their decoder reads a run of byte tokens as a whole: as its characters where all of it is UTF-8, else as one
    replacement character per byte. The text of a run is decided by the token after it, or by the first byte that makes
    it invalid; until then it is held. Up to `num_stripped` spaces at the beginning of the whole text are left out.
    """

    def __init__(self, piece_of: Callable[[int], str | int | None], *, num_stripped: int = 0) -> None:
        """`piece_of` gives the byte of a byte token, the text of any other, None for a token without text."""
        self._piece_of = piece_of
        self._num_to_strip = num_stripped
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._begin_run()

    def push(self, token_ids: Sequence[int]) -> str:
        texts: list[str] = []
        for piece in map(self._piece_of, token_ids):
            if isinstance(piece, str):
                if self._num_bytes:
                    texts.append(self._end_run())
                texts.append(piece)
            elif piece is not None:
                texts.append(self._of_byte(piece))
        text, self._num_to_strip = _without_spaces("".join(texts), self._num_to_strip)
        return text

    def held(self) -> str:
        return _without_spaces(self._characters, self._num_to_strip)[0]

    def flush(self) -> str:
        return _without_spaces(self._end_run(), self._num_to_strip)[0]

    def _begin_run(self) -> None:
        self._decoder.reset()
        self._characters = ""  # the current run's text
        self._num_bytes = 0  # length of the run, up to the byte that makes it invalid
        self._is_invalid = False

    def _of_byte(self, byte: int) -> str:
        if self._is_invalid:
            return _REPLACEMENT
        self._num_bytes += 1
        try:
            self._characters += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._characters, self._is_invalid = "", True
            return _REPLACEMENT * self._num_bytes
        return ""

    def _end_run(self) -> str:
        """The text of the run that has not been given out."""
        is_cut = bool(self._decoder.getstate()[0])  # inside a character
        text = _REPLACEMENT * self._num_bytes if is_cut and not self._is_invalid else self._characters
        self._begin_run()
        return text


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteFallbackDecoder:
    """The decoder's other steps: replacements within each token, and spaces stripped at the beginning."""

    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> "ByteFallbackDecoder | None":
        """From tokenizer.json; None for a decoder of another kind."""
        if decoder is None:
            return None
        steps = list(decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])
        replacements = []
        while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
            step = steps.pop(0)
            replacements.append((step["pattern"]["String"], step["content"]))
        num_stripped = 0
        if [step["type"] for step in steps] == ["ByteFallback", "Fuse", "Strip"]:
            strip = steps.pop()
            if (strip["content"], strip["stop"]) != (" ", 0):
                return None
            num_stripped = strip["start"]
        if [step["type"] for step in steps] not in (["ByteFallback"], ["ByteFallback", "Fuse"]):
            return None
        return cls(replacements=tuple(replacements), num_stripped=num_stripped)

    def piece(self, spelled: str | None) -> str | int | None:
        """A vocabulary entry as ByteFallbackDetokenizer takes it."""
        if spelled is None:
            return None
        for pattern, content in self.replacements:
            spelled = spelled.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(spelled)
        return int(match[1], 16) if match else spelled


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window of tokens again and emits what is new and complete.

    The window keeps the last piece's tokens in front, because what a token looks like may depend on its neighbour
    (a leading space). Tokens without text do not count: they would push the others out.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, has_text: Callable[[int], bool] = lambda token_id: True
    ) -> None:
        self._decode = decode
        self._has_text = has_text
        self._emitted: list[int] = []  # the last piece's tokens
        self._held: list[int] = []  # tokens whose text is not complete

    def push(self, token_ids: Sequence[int]) -> str:
        token_ids = [token_id for token_id in token_ids if self._has_text(token_id)]
        if not token_ids:
            return ""
        num_held = len(self._held)
        self._held += token_ids
        if num_held + 1 == len(self._held):
            return self._take(is_final=num_held >= _MAX_HELD_TOKENS)
        text = self._take(is_final=False)
        if not text:  # the last character is incomplete: where it begins shows token by token
            del self._held[num_held:]
            text = "".join(self.push((token_id,)) for token_id in token_ids)
        return text

    def held(self) -> str:
        return ""

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


def _without_spaces(text: str, num_spaces: int) -> tuple[str, int]:
    """`text` without up to `num_spaces` leading spaces, and how many may still be removed from later text."""
    if not num_spaces:
        return text, 0
    num_cut = min(len(text) - len(text.lstrip(" ")), num_spaces)
    return text[num_cut:], num_spaces - num_cut if num_cut == len(text) else 0


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
