"""The recipe that makes a canonical tensor from foreign ones, as in the tables of names."""

from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoint.expert_tensors import ExpertLayout

Recipe = Literal["stacked", "experts", "offsets", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignNames:
    """Names of the foreign parts of a canonical tensor, and the recipe to combine them.

    `stacked`: concatenated along axis 0. `experts`: converted from `layout`. `offsets`: arange + the only part.
    `identity`: arange, without a part.
    """

    parts: tuple[str, ...]
    recipe: Recipe = "stacked"
    layout: ExpertLayout | None = None


ForeignTable = dict[str, ForeignNames]


def one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,))


def expert_tensors(*parts: str, layout: ExpertLayout | None = None) -> ForeignNames:
    return ForeignNames(parts=parts, recipe="experts", layout=layout or ExpertLayout())
