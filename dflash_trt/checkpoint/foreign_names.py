"""The recipe that makes a canonical tensor from foreign ones, as in the tables of names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from dflash_trt.checkpoint.expert_tensors import ExpertLayout

Recipe = Literal["stacked", "plus_one", "experts", "offsets", "identity", "ones"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRows:
    """Some rows of a part: blocks of `length` rows, `stride` apart, the first one at `start`.

    `stored_shape` is the whole part's, which may have axes of 1 after its rows.
    """

    start: int
    length: int
    stride: int
    stored_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.length} rows from row {self.start} on"

    @property
    def is_whole(self) -> bool:
        """True if they are all rows of the part."""
        return self.length == self.stored_shape[0]

    def has_whole_blocks(self, block: int, num_rows: int) -> bool:
        """True if no chosen row shares a block of `block` stored rows with a row that is not chosen."""
        is_last = self.start + self.length == self.stored_shape[0]
        is_one = num_rows == self.length
        return (
            self.start % block == 0
            and (self.length % block == 0 or (is_one and is_last))
            and (is_one or self.stride % block == 0)
        )

    def spans(self, first: int, last: int) -> Iterator[slice]:
        """Stored positions of the chosen rows [first, last)."""
        while first < last:
            block, row = divmod(first, self.length)
            count = min(self.length - row, last - first)
            begin = self.start + block * self.stride + row
            yield slice(begin, begin + count)
            first += count


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRows:
    """All rows of a part, in the order of halves: the even rows of a head, then its odd ones.

    So RoPE turns halves where the checkpoint turns neighbours, and the scores of queries and keys remain.
    """

    head_dim: int
    stored_shape: tuple[int, ...]
    is_whole: ClassVar[bool] = True

    def __str__(self) -> str:
        return "every other row of a head"

    def has_whole_blocks(self, block: int, num_rows: int) -> bool:
        """See PartRows."""
        return block == 1

    def spans(self, first: int, last: int) -> Iterator[slice]:
        """Stored positions of the rows [first, last)."""
        for row in range(first, last):
            head, place = divmod(row, self.head_dim)
            is_odd, pair = divmod(place, self.head_dim // 2)
            begin = head * self.head_dim + 2 * pair + is_odd
            yield slice(begin, begin + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignNames:
    """Names of the foreign parts of a canonical tensor, and the recipe to combine them.

    `stacked`: concatenated along axis 0, of each part its `rows` where there are any. `plus_one`: 1 + the part.
    `experts`: converted from `layout`. `offsets`: arange + the only part. `identity`: arange, without a part. `ones`:
    what norms without a weight multiply by, without a part.
    """

    parts: tuple[str, ...]
    rows: tuple[PartRows | PairRows, ...] = ()
    recipe: Recipe = "stacked"
    layout: ExpertLayout | None = None


ForeignTable = dict[str, ForeignNames]


def one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,))


def plus_one(name: str) -> ForeignNames:
    return ForeignNames(parts=(name,), recipe="plus_one")


def expert_tensors(*parts: str, layout: ExpertLayout | None = None) -> ForeignNames:
    return ForeignNames(parts=parts, recipe="experts", layout=layout or ExpertLayout())


def mlp_names(canonical: str, foreign: str, *, has_bias: bool = False) -> ForeignTable:
    """Names of a gated MLP."""
    kinds = {"": "weight", "_bias": "bias"} if has_bias else {"": "weight"}
    return {
        f"{canonical}.{name}{suffix}": ForeignNames(parts=tuple(f"{foreign}.{word}_proj.{kind}" for word in words))
        for name, words in (("gate_up", ("gate", "up")), ("down", ("down",)))
        for suffix, kind in kinds.items()
    }


def joint_expert_names(canonical: str, foreign: str, layout: ExpertLayout | None = None) -> ForeignTable:
    """Names of all experts in one tensor for each projection."""
    names = ("gate_up", "down")
    return {f"{canonical}.{name}": expert_tensors(f"{foreign}.{name}_proj", layout=layout) for name in names}


def single_expert_names(
    canonical: str, foreign: str, num_experts: int, words: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> ForeignTable:
    """Names of a matrix for each expert and projection; `words` are gate, up and down."""
    table: ForeignTable = {}
    for name, used in (("gate_up", words[:2]), ("down", words[2:])):
        parts = [f"{foreign}.{e}.{word}.weight" for e in range(num_experts) for word in used]
        table[f"{canonical}.{name}"] = expert_tensors(*parts, layout=ExpertLayout(is_one_by_one=True))
    return table


def stacked_rows(name: str, sizes: tuple[int, ...], stored_shape: tuple[int, ...]) -> ForeignNames:
    """Segments concatenated in one stored part."""
    return ForeignNames(parts=(name,) * len(sizes), rows=part_rows(sizes, stored_shape))


def part_rows(lengths: tuple[int, ...], stored_shape: tuple[int, ...]) -> tuple[PartRows, ...]:
    """Rows of `lengths`, concatenated, repeated to the end of a part."""
    return tuple(
        PartRows(start=sum(lengths[:i]), length=length, stride=sum(lengths), stored_shape=stored_shape)
        for i, length in enumerate(lengths)
    )
