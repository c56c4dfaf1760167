"""Objects whose numbers and words differ from field to field, with two of everything.

What is printed of them shows which field went where: a field that is swapped, left out or taken twice changes the text.
A value follows from the names of its field and of those around it, so that a field more changes no other.
"""

import types
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Distinct:
    """Makes objects, each with other values than the one before."""

    def __init__(self) -> None:
        self._objects = count()

    def of(self, kind: type[T], **fixed: Any) -> T:
        """A dataclass whose fields have values of their types, but for those in `fixed`."""
        return self._object(kind, f"{kind.__name__} {next(self._objects)}", fixed)

    def renumbered(self, document: Any, path: str = "") -> Any:
        """A document of JSON with other numbers. Windows stay, as layers are counted by them."""
        if isinstance(document, Mapping):
            return {key: self.renumbered(value, f"{path}.{key}") for key, value in document.items()}
        if isinstance(document, list | tuple):
            return [self.renumbered(value, f"{i}{path}") for i, value in enumerate(document)]
        if isinstance(document, bool) or not isinstance(document, int | float) or path.endswith(".window"):
            return document
        return _plain(type(document), path)

    def _object(self, kind: type[T], path: str, fixed: Mapping[str, Any]) -> T:
        hints = get_type_hints(kind)
        assert is_dataclass(kind) and fixed.keys() <= hints.keys()
        names = [field.name for field in fields(kind) if field.init and field.name not in fixed]
        made: Any = kind(**{name: self._value(hints[name], f"{path}.{name}") for name in names}, **fixed)
        return made

    def _value(self, kind: Any, path: str) -> Any:
        origin, parts = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return self._value(next(part for part in parts if part is not type(None)), path)
        if origin is Literal:
            return parts[0]
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {self._value(parts[0], f"{i}{path}"): self._value(parts[1], f"{i}{path}") for i in range(2)}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            kinds = [parts[0]] * 2 if origin is not tuple or Ellipsis in parts else parts
            return tuple(self._value(part, f"{i}{path}") for i, part in enumerate(kinds))
        return self._object(kind, path, {}) if is_dataclass(kind) else _plain(kind, path)


def _plain(kind: Any, path: str) -> Any:
    """A value of the size that its name says."""
    number, name = 100 + zlib.crc32(path.encode()) % 900, path.rpartition(".")[2]
    if kind is bool:
        return True
    if kind is str:
        return f"{name} {number}"
    if name.endswith("_fraction") or (name.endswith("_s") and "per_s" not in name):
        return number / 1000
    number = number * 10**9 if name.endswith("_bytes") else number
    return number if kind is int else number + 0.25
