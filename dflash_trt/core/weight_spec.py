"""A canonical weight: one shape and way of sharding for every tensor of an engine.

The specs of `core/model` name theirs; `checkpoint/` fills that table from foreign names, `engine_dir` stores it,
`network/` consumes it. Nobody else invents a tensor name.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Sharding = Literal["replicated", "rows", "columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """A tensor of the whole model and how tensor parallelism cuts it.

    `rows` cuts axis 0 (output features), `columns` cuts axis 1 (input features; the partial results are summed by
    an all-reduce). `segments` are the row counts of parts fused along axis 0, each of which is cut on its own: a rank
    gets its share of q, of k and of v.
    """

    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    segments: tuple[int, ...] = ()
    is_integer: bool = False  # token ids: never cast to the engine's dtype


WeightTable = dict[str, WeightSpec]


def segments_of(spec: WeightSpec) -> tuple[int, ...]:
    """Rows per stacked linear; one segment for a linear that is not fused."""
    return spec.segments or (spec.shape[0],)


def extra_heads(table: WeightTable, linears: Iterable[str]) -> tuple[str, ...]:
    """Heads among `linears` that the models themselves do not have: copies of the target's."""
    wanted = set(linears)
    return tuple(name for name in ("target.lm_head", "draft.lm_head") if name in wanted and name not in table)


def rank_shard(spec: WeightSpec, tp_size: int) -> WeightSpec:
    """The part that every rank of `tp_size` holds, as a spec of its own."""
    rows, cut = spec.shape[0], tp_size if spec.sharding != "replicated" else 1
    if spec.sharding == "columns":
        return replace(spec, shape=(rows, spec.shape[1] // cut))
    shape = (rows // cut, *spec.shape[1:])
    return replace(spec, shape=shape, segments=tuple(segment // cut for segment in spec.segments))


def is_linear(spec: WeightSpec, name: str) -> bool:
    """Whether a canonical tensor is the weight of a GEMM: a matrix that is no embedding, and no biases of experts."""
    return len(spec.shape) == 2 and not name.endswith((".embedding", "_bias"))


def row_sharded(shape: tuple[int, ...], segments: tuple[int, ...] = ()) -> WeightSpec:
    """Output features cut over the ranks; `segments` unless all rows are one."""
    return WeightSpec(shape=shape, sharding="rows", segments=segments or shape[:1])
