"""Known pairs of Hugging Face repositories: known_pairs.toml, and its entries by name.

Knows names only; no network, no files of checkpoints.
"""

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from pydantic import Field, JsonValue

from dflash_trt.core.frozen import Frozen

_CACHED = "models--"  # the hub's cache keeps a repository in models--OWNER--NAME/snapshots/COMMIT


class KnownPair(Frozen):
    """A drafter and the targets it serves: the one it was trained for, then quantized copies of that.

    `needs` is what this version cannot read yet. `reason` says why the pair has chat template options. A build that
    names no drafter takes that of the pair which `is_default`.
    """

    targets: tuple[str, ...] = Field(min_length=1)
    drafter: str
    needs: str | None = None
    is_default: bool = True
    chat_template_options: dict[str, JsonValue] = Field(default_factory=dict)
    reason: str = ""
    source: str

    @property
    def target(self) -> str:
        return self.targets[0]


@cache
def known_pairs() -> tuple[KnownPair, ...]:
    """All pairs; those that this version can build come first."""
    fields: dict[str, Any] = tomllib.loads(files("dflash_trt.core").joinpath("known_pairs.toml").read_text("utf-8"))
    return tuple(KnownPair(**pair) for pair in fields["pairs"])


def pairs_of_target(name: str) -> tuple[KnownPair, ...]:
    """Pairs with that target. The hub does not tell upper case from lower case."""
    return tuple(pair for pair in known_pairs() if name.lower() in map(str.lower, pair.targets))


def pair_of_drafter(name: str) -> KnownPair | None:
    return next((pair for pair in known_pairs() if pair.drafter.lower() == name.lower()), None)


def pair_of_drafter_directory(path: PurePath) -> KnownPair | None:
    """The pair of a local copy, by a name on its path: the repository's, or its place in the hub's cache."""
    *parents, name = path.parts or ("",)
    cached = next((part for part in reversed(parents) if part.startswith(_CACHED)), None)
    names = {name.lower(), (cached or "").removeprefix(_CACHED).replace("--", "/").lower()}
    return next((pair for pair in known_pairs() if {pair.drafter.lower(), _last(pair.drafter)} & names), None)


def listed_pairs() -> str:
    """Those that can be built, each target once with its default drafter, for an error message."""
    pairs = (pair for pair in known_pairs() if pair.needs is None and pair.is_default)
    return "; ".join(f"{pair.target} with {pair.drafter}" for pair in pairs)


def _last(name: str) -> str:
    return name.rpartition("/")[2].lower()
