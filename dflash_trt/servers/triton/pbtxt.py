"""The text form of protocol buffers, as far as config.pbtxt uses it, without the protobuf package.

A message is a list of (name, value), for a name may occur again. Enum values are `Word`s. Knows no field of Triton's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from dflash_trt.core.errors import ConfigError


class Word(str):
    """A bare word: an enum value."""

    __slots__ = ()


Value: TypeAlias = "str | int | float | bool | list[Value] | Message"


class Message:
    """Fields in their order."""

    def __init__(self, fields: Sequence[tuple[str, Value]] = ()) -> None:
        self.fields = list(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self.fields == other.fields

    __hash__ = None  # type: ignore[assignment]

    def all(self, name: str) -> list[Value]:
        """Every value of a field, written once per value or as one list."""
        found: list[Value] = []
        for field, value in self.fields:
            if field == name:
                found.extend(value if isinstance(value, list) else [value])
        return found

    def one(self, name: str) -> Value | None:
        """The last value of a field; None where it is missing."""
        values = self.all(name)
        return values[-1] if values else None


def write(message: Message) -> str:
    """Text that `read` gives back."""
    return "".join(f"{line}\n" for line in _lines(message, ""))


def read(text: str, *, subject: str) -> Message:
    """Parse; `subject` names the file in errors.

    Raises:
        ConfigError: the text is no text-form message; the error says at which line.
    """
    return _Parser(text, subject).message(closing=None)


def _lines(message: Message, indent: str) -> Iterator[str]:
    for name, value in message.fields:
        if isinstance(value, Message):
            yield f"{indent}{name} {{"
            yield from _lines(value, indent + "  ")
            yield f"{indent}}}"
        elif isinstance(value, list):
            yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]"
        else:
            yield f"{indent}{name}: {_scalar(value)}"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word) or not isinstance(value, str):
        return str(value)
    escaped = "".join(_escaped(byte) for byte in value.encode())
    return f'"{escaped}"'


def _escaped(byte: int) -> str:
    character = chr(byte)
    if character in '"\\':
        return "\\" + character
    return character if 0x20 <= byte < 0x7F else f"\\{byte:03o}"


_TOKEN = re.compile(
    r"""
    (?P<space>[\s]+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?))
    |(?P<mark>[{}<>\[\]:,;])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_SIMPLE_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_CLOSING = {"{": "}", "<": ">"}


class _Parser:
    def __init__(self, text: str, subject: str) -> None:
        self._text = text
        self._subject = subject
        self._tokens = list(self._split(text))
        self._index = 0

    def message(self, *, closing: str | None) -> Message:
        fields: list[tuple[str, Value]] = []
        while True:
            kind, token, _ = self._take()
            if (kind, token) == ("mark", closing) or (kind == "end" and closing is None):
                return Message(fields)
            if token in (",", ";") and fields:
                continue
            if kind != "word":
                raise self._error("the name of a field", token or "the end of the file")
            fields.append((token, self._value(needs_colon=True)))

    def _value(self, *, needs_colon: bool) -> Value:
        kind, token, _ = self._take()
        if needs_colon and token == ":":
            kind, token, _ = self._take()
        elif needs_colon and token not in _CLOSING:
            raise self._error("':' or '{'", token)
        if kind == "mark" and token in _CLOSING:
            return self.message(closing=_CLOSING[token])
        if token == "[":
            return self._list()
        if kind == "string":
            return self._string(token)
        if kind == "number":
            return self._number(token)
        if kind == "word":
            return {"true": True, "false": False}.get(token, Word(token))
        raise self._error("a value", token or "the end of the file")

    def _list(self) -> list[Value]:
        values: list[Value] = []
        while self._peek() != "]":
            values.append(self._value(needs_colon=False))
            if self._peek() == ",":
                self._take()
            elif self._peek() != "]":
                raise self._error("',' or ']'", self._peek() or "the end of the file")
        self._take()
        return values

    def _string(self, token: str) -> str:
        """Neighbouring strings are one."""
        parts = [token]
        while self._tokens[self._index][0] == "string":
            parts.append(self._take()[1])
        try:
            return b"".join(_ESCAPE.sub(_unescaped, part[1:-1].encode()) for part in parts).decode()
        except UnicodeDecodeError:
            raise self._error("UTF-8 text", token) from None

    def _number(self, token: str) -> int | float:
        try:
            return int(token, 0)
        except ValueError:
            return float(token.removesuffix("f"))

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._index]
        self._index = min(self._index + 1, len(self._tokens) - 1)
        return token

    def _peek(self) -> str:
        return self._tokens[self._index][1]

    def _split(self, text: str) -> Iterator[tuple[str, str, int]]:
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error_at(position, "the text form of a protocol buffer", repr(text[position]))
            if match.lastgroup != "space":
                assert match.lastgroup is not None
                yield match.lastgroup, match.group(), position
            position = match.end()
        yield "end", "", position

    def _error(self, expected: str, found: str) -> ConfigError:
        return self._error_at(self._tokens[max(0, self._index - 1)][2], expected, found)

    def _error_at(self, position: int, expected: str, found: str) -> ConfigError:
        line = self._text.count("\n", 0, position) + 1
        hint = "Correct the file, or write it again with `dflash-trt deploy triton`."
        return ConfigError.about(f"{self._subject}, line {line}", expected=expected, found=found, hint=hint)


def _unescaped(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    return _SIMPLE_ESCAPES.get(other, other)
