"""Build configurations that come with the package, and recipes.toml, which says what each is for.

Each NAME.yaml is a file for `dflash-trt build`; a name stands for its file.
"""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from dflash_trt.core.frozen import Frozen


class Recipe(Frozen):
    """`weights_gib` is the size of target and drafter as an engine stores them, over all ranks."""

    name: str
    format: str
    gpus: tuple[str, ...] = ()
    weights_gib: float = Field(gt=0)

    @property
    def path(self) -> Path:
        return _DIRECTORY / f"{self.name}.yaml"


_DIRECTORY = Path(str(files(__name__)))


def recipes() -> tuple[Recipe, ...]:
    """All recipes, in the order of recipes.toml."""
    fields: dict[str, Any] = tomllib.loads((_DIRECTORY / "recipes.toml").read_text("utf-8"))
    return tuple(Recipe(name=name, **facts) for name, facts in fields.items())


def recipe_path(name: str) -> Path | None:
    """The file of a recipe; None for any other name."""
    return next((recipe.path for recipe in recipes() if recipe.name == name), None)
