"""The base of every config and spec: frozen, keyword-only, and strict about unknown keys."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dflash_trt.core.errors import problem

MAX_INT32 = 2**31 - 1  # no size, count or token id is larger: steps carry them as int32

Index = Annotated[int, Field(ge=0, le=MAX_INT32)]
Size = Annotated[int, Field(ge=1, le=MAX_INT32)]
Scale = Annotated[float, Field(gt=0.0, le=1e6)]


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


F = TypeVar("F", bound=Frozen)


def checked(kind: type[F], fields: Mapping[str, Any], *, label: str, problems: list[str]) -> F | None:
    """Validate fields; append a problem for each one out of range, and return None if there was any."""
    try:
        return kind(**fields)
    except ValidationError as error:
        # A problem that all layers have is reported for the first only.
        distinct: dict[Any, Any] = {}
        for details in error.errors():
            names = tuple(part for part in details["loc"] if isinstance(part, str))
            distinct.setdefault((names, details["msg"], repr(details["input"])), details)
        for details in distinct.values():
            expected = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            subject = f"{label}: {'.'.join(map(str, details['loc'])) or kind.__name__}"
            found = f"{details['input']!r:.80}" if details["loc"] else "another combination"
            problems.append(problem(subject, expected=expected, found=found))
        return None


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
