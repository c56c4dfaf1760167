"""Checks of values that callers pass from Python, and their conversion to builtin types.

numpy's integers and floats are accepted. A bool is not a number, and a float is not an integer whatever its value.
"""

from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from dflash_trt.core.errors import RequestError, problem, raise_all

INT32_MAX = 2**31 - 1
FLOAT32_TINY = 2.0**-126  # smaller ones are subnormal: devices may take them for 0

_MAX_SHOWN = 80  # characters of a wrong value

_T = TypeVar("_T")
Reader = Callable[[object], _T]  # raises ValueError, with what was expected


def check_fields(owner: object, readers: Mapping[str, Reader[Any]], *, prefix: str = "", heading: str) -> None:
    """Replace each field of a frozen dataclass by the value that its reader returns.

    Raises:
        RequestError: every field whose value is refused.
    """
    problems = []
    for name, read in readers.items():
        value = getattr(owner, name)
        try:
            object.__setattr__(owner, name, read(value))
        except ValueError as error:
            problems.append(_refusal(f"{prefix}{name}", value, error))
    raise_all(RequestError, heading, problems)


def checked(name: str, value: object, read: Reader[_T]) -> _T:
    """Read one argument; raises RequestError."""
    try:
        return read(value)
    except ValueError as error:
        raise RequestError(_refusal(name, value, error)) from error


def integer(expected: str, min_value: int | None = None, max_value: int | None = None) -> Reader[int]:
    """Reader of an int, or an integer of numpy, within bounds."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(expected)
        number = int(value)
        if (min_value is not None and number < min_value) or (max_value is not None and number > max_value):
            raise ValueError(expected)
        return number

    return read


def number(expected: str, is_valid: Callable[[float], bool]) -> Reader[float]:
    """Reader of a float, an int or a number of numpy that `is_valid` accepts."""

    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(expected)
        try:
            number = float(value)
        except OverflowError:  # an int that no float can hold
            raise ValueError(expected) from None
        if not is_valid(number):
            raise ValueError(expected)
        return number

    return read


def text(expected: str, *, min_len: int = 0) -> Reader[str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or len(value) < min_len:
            raise ValueError(expected)
        return value

    return read


def function(expected: str) -> Reader[Callable[..., Any]]:
    def read(value: object) -> Callable[..., Any]:
        if not callable(value):
            raise ValueError(expected)
        return value

    return read


def instance(expected: str, kind: type[_T]) -> Reader[_T]:
    def read(value: object) -> _T:
        if not isinstance(value, kind):
            raise ValueError(expected)
        return value

    return read


def optional(read: Reader[_T]) -> Reader[_T | None]:
    return lambda value: None if value is None else read(value)


def tuple_of(expected: str, read: Reader[_T]) -> Reader[tuple[_T, ...]]:
    """Reader of a list, a tuple, a set or an array."""

    def read_all(value: object) -> tuple[_T, ...]:
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            raise ValueError(expected)
        try:
            items = list(value)
        except TypeError:  # an array without axes
            raise ValueError(expected) from None
        return tuple(map(read, items))

    return read_all


def number_by_id(
    expected: str, is_valid: Callable[[float], bool], *, max_num: int
) -> Reader[tuple[tuple[int, float], ...]]:
    """Reader of at most `max_num` numbers by token id, sorted.

    They are a mapping, whose keys may be text as in JSON, "ID=NUMBER" or pairs.
    """
    read_id, read_number = integer(expected, 0, INT32_MAX), number(expected, is_valid)

    def read_pair(item: object) -> tuple[int, float]:
        if isinstance(item, str):
            item = item.split("=")
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(expected)
        key, value = item
        try:
            key, value = int(key) if isinstance(key, str) else key, float(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError(expected) from None
        return read_id(key), read_number(value)

    def read(value: object) -> tuple[tuple[int, float], ...]:
        items: Any = value.items() if isinstance(value, Mapping) else value
        if not isinstance(items, Collection) or isinstance(items, str | bytes):
            raise ValueError(expected)
        if len(items) > max_num:
            raise ValueError(f"{expected}, at most {max_num} tokens")
        pairs = sorted(map(read_pair, items))
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError(f"{expected}, each token once")
        return tuple(pairs)

    return read


def shown(value: object) -> str:
    """repr() of a value, shortened for an error message."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a foreign repr, or an int with more digits than Python writes
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _refusal(name: str, value: object, error: ValueError) -> str:
    return problem(name, expected=str(error), found=shown(value))
