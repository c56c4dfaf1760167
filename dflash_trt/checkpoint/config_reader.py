"""Typed, strict reading of foreign JSON: every key is read, declared harmless, or refused.

A build may override keys of a drafter's config.json, without changing its files.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.checkpoint.foreign_keys import ON_BY_DEFAULT
from dflash_trt.core import json_object
from dflash_trt.core.errors import problem
from dflash_trt.core.frozen import nearest_name
from dflash_trt.core.json_object import printable

Fields = Mapping[str, Any]
T = TypeVar("T")

_DOWNLOAD_AGAIN = "Download it again."
_MAX_SHOWN_CHARS = 80
_MAX_UNKNOWN_KEYS = 16  # looked up among the known names, one by one
_MAX_INTEGER = 2**31 - 1  # no size, count or token id of a model is larger


def read_json_object(path: Path, *, label: str, problems: list[str]) -> dict[str, Any] | None:
    """Read the JSON object in a file; append a problem and return None on failure."""
    if not path.is_file():
        problems.append(problem(label, expected="a file", found=f"none at {path}", hint=_DOWNLOAD_AGAIN))
        return None
    try:
        return json_object.read_json_object(path)
    except (ValueError, OSError) as error:
        problems.append(problem(label, expected="a JSON object", found=f"{error}", hint=_DOWNLOAD_AGAIN))
        return None


class ConfigReader:
    """Reads a JSON object key by key and tracks which keys were read. `notes` get defaults of absent keys.

    A wrong or missing value appends to `problems` and gives a valid placeholder, so that one pass finds every problem.
    The caller must not use the values once `problems` has grown. A null counts as absent.
    """

    def __init__(
        self, fields: Fields, *, label: str, problems: list[str], notes: list[str] | None = None, prefix: str = ""
    ) -> None:
        self._fields = fields
        self._label = label
        self._prefix = prefix
        self._known: set[str] = set()
        self.problems = problems
        self.notes = [] if notes is None else notes

    def subject(self, name: str) -> str:
        return f"{self._label} key '{self._prefix}{printable(name)}'"

    def has(self, name: str) -> bool:
        self._known.add(name)
        return self._fields.get(name) is not None

    def is_given(self, name: str) -> bool:
        """True if the key is there, null or not: for a default that null takes away."""
        self._known.add(name)
        return name in self._fields

    def value(self, name: str) -> Any:
        self._known.add(name)
        return self._fields.get(name)

    def refuse(self, name: str, *, expected: str, hint: str = "") -> None:
        found = shown(self.value(name)) if name in self._fields else "nothing"
        self.problems.append(problem(self.subject(name), expected=expected, found=found, hint=hint))

    def note(self, name: str, assumed: str) -> None:
        """Say what an absent or ambiguous key is taken to be."""
        found = shown(self.value(name)) if name in self._fields else "absent"
        self.notes.append(f"{self.subject(name)} is {found}: {assumed}")

    def integer(self, name: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        return self._required(name, value, minimum)

    def optional_integer(self, name: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int | None:
        value = self.value(name)
        if value is None or (_is_integer(value) and minimum <= value <= maximum):
            return value if value is None else int(value)
        self.refuse(name, expected=f"an integer in {minimum}..{maximum}")
        return minimum

    def number(self, name: str) -> float:
        return self._required(name, self.optional_number(name), 1.0)

    def optional_number(self, name: str) -> float | None:
        """A positive finite number."""
        value = self.value(name)
        if value is None or (_is_number(value) and 0 < value <= sys.float_info.max):
            return value if value is None else float(value)
        self.refuse(name, expected="a positive number")
        return 1.0

    def flag(self, name: str, *, default: bool) -> bool:
        """Read a flag. Where the default is true, refuse null: transformers reads null as false."""
        value = self.optional_flag(name)
        if value is None and default and self.is_given(name):
            self.refuse(name, expected="true or false", hint="Remove the key for true.")
        return default if value is None else value

    def optional_flag(self, name: str) -> bool | None:
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(name, expected="true or false")
        return False

    def optional_text(self, name: str) -> str | None:
        value = self.value(name)
        if value is None or isinstance(value, str):
            return value
        self.refuse(name, expected="a string")
        return ""

    def optional_integers(self, name: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A list of integers; one bare integer counts as a list of one."""
        value = self.value(name)
        items = [value] if _is_integer(value) else value
        if items is None or (isinstance(items, list) and all(_is_integer(x) and x >= minimum for x in items)):
            return None if items is None else tuple(items)
        self.refuse(name, expected=f"a list of integers of {minimum} or more")
        return ()

    def optional_numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of positive finite numbers."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, list) and all(_is_number(x) and 0 < x <= sys.float_info.max for x in value):
            return tuple(float(x) for x in value)
        self.refuse(name, expected="a list of positive numbers")
        return ()

    def optional_texts(self, name: str) -> tuple[str, ...] | None:
        value = self.value(name)
        if value is None or (isinstance(value, list) and all(isinstance(x, str) for x in value)):
            return None if value is None else tuple(value)
        self.refuse(name, expected="a list of strings")
        return ()

    def optional_section(self, name: str) -> "ConfigReader | None":
        """A nested object, as a reader to be finished on its own."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, expected="a JSON object")
            value = {}
        return self.nested(name, value)

    def nested(self, name: str, fields: Fields) -> "ConfigReader":
        prefix = f"{self._prefix}{name}."
        return ConfigReader(fields, label=self._label, problems=self.problems, notes=self.notes, prefix=prefix)

    def require(self, name: str, *allowed: Any, hint: str, default: Any = None) -> None:
        """Refuse all values but the allowed ones; an absent key counts as `default`."""
        value = self.value(name)
        effective = default if value is None else value
        if effective is None or any(_is_same(effective, option) for option in allowed):
            return
        expected = " or ".join(shown(option) for option in allowed) or "no such key"
        self.refuse(name, expected=expected, hint=hint)

    def ignore(self, names: Iterable[str]) -> None:
        """Declare keys that do not change the computation."""
        self._known.update(names)

    def finish(self) -> None:
        """Refuse every key that was neither read nor ignored, unless its value asks for nothing."""
        unknown = sorted(name for name in set(self._fields) - self._known if not _is_neutral(name, self._fields[name]))
        for name in unknown[:_MAX_UNKNOWN_KEYS]:
            nearest = nearest_name(name, self._known)
            hint = f"Did you mean '{nearest}'? " if nearest else ""
            hint = f"{hint}Remove the key if the model computes the same without it."
            found = shown(self._fields[name])
            self.problems.append(problem(self.subject(name), expected="no such key", found=found, hint=hint))
        if len(unknown) > _MAX_UNKNOWN_KEYS:
            self.problems.append(f"{self._label} has {len(unknown) - _MAX_UNKNOWN_KEYS} more unknown keys.")

    def _required(self, name: str, value: T | None, stand_in: T) -> T:
        if value is not None:
            return value
        self.refuse(name, expected="a value", hint=f"Add '{name}' with the value that the checkpoint was trained with.")
        return stand_in


def shown(value: Any) -> str:
    """A JSON value as in the file, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _is_neutral(name: str, value: Any) -> bool:
    """True if an unknown key with this value adds nothing to the model."""
    return value in (None, [], {}) or (value is False and name not in ON_BY_DEFAULT)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same(value: Any, option: Any) -> bool:
    """True if equal; JSON's true is not 1."""
    return isinstance(value, bool) == isinstance(option, bool) and bool(value == option)


_SECTIONS = ("dflash_config", "transformer_layer_config")


def with_overrides(
    fields: Fields, overrides: Mapping[str, Any], *, label: str, notes: list[str], problems: list[str]
) -> dict[str, Any]:
    """Return `fields` with these values, and add a note for each. A null counts as an absent key.

    A key is replaced where it is: at the top level, or in one of the formats' sections. A new key is added at the top
    level, or in the section that it names ("dflash_config.is_causal").
    """
    changed = dict(fields)
    for name, value in overrides.items():
        section, key = _place(changed, name)
        inside = changed if section is None else changed.get(section, {})
        if not isinstance(inside, dict):
            problems.append(problem(f"{label} key '{section}'", expected="a JSON object", found=shown(inside)))
            continue
        before = shown(inside[key]) if key in inside else "nothing"
        inside = {**inside, key: value}
        changed = inside if section is None else changed | {section: inside}
        notes.append(
            f"{label} key '{printable(name)}' is {shown(value)} instead of {before}, as drafter_overrides says"
        )
    return changed


def _place(fields: Fields, name: str) -> tuple[str | None, str]:
    """The key's section, None for the top level, and its name there."""
    section, dot, key = name.partition(".")
    if dot and section in _SECTIONS:
        return section, key
    if name not in fields:
        for section in _SECTIONS:
            if isinstance(fields.get(section), dict) and name in fields[section]:
                return section, name
    return None, name
