"""The base of every config and spec: frozen, keyword-only, and strict about unknown keys."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name a misspelt one most likely meant, or None."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None
