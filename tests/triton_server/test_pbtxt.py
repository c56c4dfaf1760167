"""The text form of protocol buffers as other programs write it."""

from typing import Any

import pytest

from dflash_trt.core.errors import ConfigError
from dflash_trt.servers.triton.pbtxt import Message, Word, read, write


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a: 1 # a note\nb: 2", [("a", 1), ("b", 2)]),
        ("a: 1, b: 2; c: 3", [("a", 1), ("b", 2), ("c", 3)]),
        ("a: 0x1F b: -7 c: +3", [("a", 31), ("b", -7), ("c", 3)]),
        ("a: 1.5 b: 2.5f c: 1e3 d: .5", [("a", 1.5), ("b", 2.5), ("c", 1e3), ("d", 0.5)]),
        ("a: true b: false c: TYPE_BOOL", [("a", True), ("b", False), ("c", Word("TYPE_BOOL"))]),
        ("a { b: 1 } c: { b: 2 } d < b: 3 >", [("a", [("b", 1)]), ("c", [("b", 2)]), ("d", [("b", 3)])]),
        ("a: [] b: [1, 2] c: [{ d: 1 }, { d: 2 }]", [("a", []), ("b", [1, 2]), ("c", [[("d", 1)], [("d", 2)]])]),
        ("a: 'single \"quotes\"' b: \"two\" 'parts'", [("a", 'single "quotes"'), ("b", "twoparts")]),
        (r'a: "\n\t\"\\\x41\101\303\251\'"', [("a", "\n\t\"\\AAé'")]),
    ],
)  # fmt: skip
def test_every_spelling_of_a_message_is_read(text: str, fields: Any) -> None:
    def message(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], tuple):
            return Message([(name, message(field)) for name, field in value])
        return [message(item) for item in value] if isinstance(value, list) else value

    found = read(text, subject="test")
    assert found == message(fields)
    assert [type(value) for _, value in found.fields] == [type(value) for _, value in message(fields).fields]
    if "[{" not in text:  # which is never written
        assert read(write(found), subject="test") == found


def test_a_field_that_occurs_again_has_all_its_values_and_its_last_one() -> None:
    found = read("a: 1 b: 5 a: [2, 3]", subject="test")
    assert (found.all("a"), found.one("a"), found.all("c"), found.one("c")) == ([1, 2, 3], 3, [], None)


@pytest.mark.parametrize(
    ("text", "line", "expected", "found"),
    [
        ("a: 1\n}", 2, "the name of a field", "}"),
        ("a: 1\nb {\n c: 2", 3, "the name of a field", "the end of the file"),
        ("a: {\n b: 1 >", 2, "the name of a field", ">"),
        ("a:\n:", 2, "a value", ":"),
        ("a: [1\n2]", 2, "',' or ']'", "2"),
        ("a 1", 1, "':' or '{'", "1"),
        ("\n\na: ?", 3, "the text form of a protocol buffer", "'?'"),
        ('a: "\\377"', 1, "UTF-8 text", '"\\377"'),
        ('a: "open\n"', 1, "the text form of a protocol buffer", "'\"'"),
        (", a: 1", 1, "the name of a field", ","),
    ],
)
def test_what_is_no_message_is_refused_where_it_stands(text: str, line: int, expected: str, found: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(text, subject="the.pbtxt")
    assert f"expected {expected}, found {found}" in str(refusal.value)
    assert f"the.pbtxt, line {line}:" in str(refusal.value) or "[1" in text
