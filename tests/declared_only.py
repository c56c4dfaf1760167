"""A Python in which only the declared dependencies of dflash-trt can be imported: no extra, nor what tests bring along.

As a program it hides all other distributions, then runs the Python text of its first argument with the other words.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def declared() -> set[str]:
    """Distributions that an install of dflash-trt without extras brings along, by their dependencies' metadata."""
    found: set[str] = set()
    waiting = [("dflash-trt", "")]
    while waiting:
        name, extra = waiting.pop()
        found.add(name)
        waiting += [each for each in _required(name, extra) if each[0] not in found or each[1]]
    return found


def _required(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:  # of another platform, or without a use here
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(requirement.name), each) for each in ("", *requirement.extras))


def undeclared_modules() -> set[str]:
    """Top-level names that only other distributions provide."""
    kept = declared()
    return {
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & kept
    }


class _Declared(PathFinder):
    """The finder of the path, to which the other distributions' modules do not exist."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in cls.hidden else super().find_spec(fullname, path, target)


def hide_the_rest() -> None:
    _Declared.hidden = frozenset(undeclared_modules())
    sys.meta_path[:] = [_Declared if finder is PathFinder else finder for finder in sys.meta_path]


if __name__ == "__main__":
    hide_the_rest()
    program, sys.argv = sys.argv[1], ["dflash-trt", *sys.argv[2:]]
    exec(program, {"__name__": "__main__"})
