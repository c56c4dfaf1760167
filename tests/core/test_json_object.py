import json
import time
from pathlib import Path

import pytest

from dflash_trt.core import json_object
from dflash_trt.core.json_object import parse_json_object, printable, read_json_object


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"[]", "a JSON list, not an object"),
        (b"3", "a JSON int, not an object"),
        (b"\xff{}", "utf-8"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"b": [{"a": 1, "a": 1}]}', "key 'a' 2 times in one object"),
        (b'{"a\\n": 1, "a\\n": 1}', r"key ''a\\n'' 2 times"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "integer string conversion"),
    ],
)
def test_what_is_no_json_object_is_refused_in_words(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_json_object(content)


def test_an_object_is_what_the_standard_library_reads() -> None:
    fields = {"a": [1, {"b": None}], "ü": "\u0000", "c": 1e300, "d": {}}
    assert parse_json_object(json.dumps(fields).encode()) == fields


def test_keys_that_stand_twice_are_found_in_linear_time() -> None:
    """600 kB of pairs, which took two minutes when each name was counted in the list of all."""
    pairs = ",".join(f'"{i:06}": 0' for i in [*range(25_000), *range(25_000)])
    started_s = time.monotonic()
    with pytest.raises(ValueError, match="key '000000' 2 times in one object"):
        parse_json_object(f"{{{pairs}}}".encode())
    assert time.monotonic() - started_s < 5


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "config.json") == {"a": 1}
    monkeypatch.setattr(json_object, "MAX_JSON_BYTES", 8)
    assert read_json_object(tmp_path / "config.json") == {"a": 1}
    monkeypatch.setattr(json_object, "MAX_JSON_BYTES", 7)
    with pytest.raises(ValueError, match="8 bytes, more than 7"):
        read_json_object(tmp_path / "config.json")


def test_a_foreign_name_neither_breaks_nor_floods_a_line() -> None:
    assert printable("rope_theta") == "rope_theta"
    assert printable("a\nb") == r"'a\nb'"
    assert len(printable("x" * 10**6)) < 100 and printable("x" * 80) == "x" * 80
