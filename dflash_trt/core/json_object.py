"""Read a JSON object from an untrusted file: bounded in size, without duplicate keys."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 256 * 2**20  # tokenizer.json of a vocabulary of 262,144 tokens has 33 MB
_MAX_NAME_CHARS = 80


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the object in a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: too large, or see `parse_json_object`.
    """
    num_bytes = path.stat().st_size
    if num_bytes > MAX_JSON_BYTES:
        raise ValueError(f"{num_bytes} bytes, more than {MAX_JSON_BYTES}")
    return parse_json_object(path.read_bytes())


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Parse the object in `content`, in time linear in its size.

    Raises:
        ValueError: bad UTF-8, bad JSON, nested too deeply, not an object, or a duplicate key.
    """
    try:
        fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__}, not an object")
    return fields


def printable(name: str) -> str:
    """Escape and shorten a foreign name for an error message."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= _MAX_NAME_CHARS else f"{text[:_MAX_NAME_CHARS]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (name, count), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key '{printable(name)}' {count} times in one object")
    return fields
