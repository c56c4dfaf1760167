"""Names of checkpoints on the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION, and known pairs of them.

The pairs are in known_pairs.toml.
Knows names only; no network, no files of checkpoints.
"""

import re
import shlex
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any, Self

from pydantic import Field, JsonValue

from dflash_trt.core.frozen import Frozen

_PART = r"[A-Za-z0-9](?:[\w.-]*\w)?"  # huggingface_hub's rules for names that distinguish them from paths
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?", re.ASCII)


class HubName(Frozen):
    """A repository; `revision` is a branch, a tag or a commit (default: the main branch)."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for text that can only be a path."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(repository=found[1], revision=found[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


class HubSource(Frozen):
    """Origin of a downloaded checkpoint: `commit` is what `name` stood for."""

    name: str
    commit: str


def build_command(checkpoint: str) -> str:
    """The command that builds an engine from a checkpoint, a name on the hub or a directory."""
    name = HubName.parse(checkpoint)
    is_local = name is None or Path(checkpoint).exists()
    output = f"{Path(checkpoint).absolute().name}-engine" if is_local else str(name).partition("@")[0].partition("/")[2]
    return f"dflash-trt build --target {shlex.quote(checkpoint)} -o {shlex.quote(output.lower())}"


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
