"""Draft lengths by a size, as users write them: `1:7,16:5` in texts, a mapping in Python and JSON."""

from collections.abc import Mapping
from numbers import Integral

from dflash_trt.core.frozen import MAX_INT32


def lengths_by_batch_size(value: object) -> dict[int, int] | None:
    """Raises ValueError, with what was expected."""
    lengths = _lengths(value)
    if lengths is not None and min(lengths, default=0) != 1:
        raise ValueError("batch sizes from 1 on with their drafts, such as 1:7,16:5,64:3")
    return lengths


def lengths_by_context(value: object) -> dict[int, int] | None:
    """Raises ValueError, with what was expected."""
    lengths = _lengths(value)
    if lengths is not None and min(lengths, default=0) < 1:
        raise ValueError("context lengths of 1 or more with their drafts, such as 32768:3")
    return lengths


def lengths_text(lengths: Mapping[int, int]) -> str:
    """As it is read again."""
    return ",".join(f"{size}:{length}" for size, length in lengths.items())


def _lengths(value: object) -> dict[int, int] | None:
    """By ascending size. Keys of a JSON mapping are texts."""
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else [pair.split(":") for pair in str(value).split(",")]
    try:
        lengths = [(_integer(size), _integer(length)) for size, length in pairs]
    except ValueError:
        raise ValueError("pairs SIZE:LENGTH of integers of 0 or more, such as 1:7,16:5") from None
    if len(dict(lengths)) < len(lengths):
        raise ValueError("each size once")
    return dict(sorted(lengths))


def _integer(value: object) -> int:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    number = int(value) if is_integer or isinstance(value, str) else -1  # type: ignore[call-overload]
    if not 0 <= number <= MAX_INT32:
        raise ValueError
    return int(number)
