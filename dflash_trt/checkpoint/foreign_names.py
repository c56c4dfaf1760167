"""How a canonical tensor is made of foreign ones: the vocabulary of the tables of names."""

from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoint.expert_tensors import ExpertLayout

Recipe = Literal["stacked", "experts", "offsets", "identity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignNames:
    """How a canonical tensor is made of foreign ones.

    `stacked`: the parts one below the other, along axis 0. `experts`: as `layout` says. `offsets`: row i holds the
    distance from i to its value, so the canonical tensor is arange + part. `identity`: no part, arange.
    """

    parts: tuple[str, ...]
    recipe: Recipe = "stacked"
    layout: ExpertLayout | None = None


ForeignTable = dict[str, ForeignNames]


def one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,))


def expert_tensors(*parts: str, layout: ExpertLayout | None = None) -> ForeignNames:
    return ForeignNames(parts=parts, recipe="experts", layout=layout or ExpertLayout())
