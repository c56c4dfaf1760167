"""Canonical weights: name, shape and sharding of every tensor of an engine.

The specs of `core/model` name them, `checkpoint/` fills the table from foreign names, `engine_dir` stores it and
`network/` reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Sharding = Literal["replicated", "rows", "columns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """A tensor of the whole model, and how tensor parallelism shards it.

    `rows` shards axis 0 (output features), `columns` axis 1 (input features; an all-reduce sums the partial results).
    `segments` are the row counts of parts fused along axis 0, each sharded on its own, as q, k and v are. `units` are
    the rows of each segment that stay together (default: 1), as those of a K/V head do: with fewer units than ranks,
    several ranks hold the same unit.
    """

    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    segments: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    is_integer: bool = False  # token ids: never cast to the engine's dtype


WeightTable = dict[str, WeightSpec]


def segments_of(spec: WeightSpec) -> tuple[int, ...]:
    """Rows per fused part; one segment for a linear layer that is not fused."""
    return spec.segments or (spec.shape[0],)


def segment_specs(spec: WeightSpec) -> tuple[WeightSpec, ...]:
    """Each fused part as a tensor of its own."""
    segments = segments_of(spec)
    units = spec.units or (1,) * len(segments)
    return tuple(
        replace(spec, shape=(rows, *spec.shape[1:]), segments=(rows,), units=(unit,))
        for rows, unit in zip(segments, units, strict=True)
    )


def extra_heads(table: WeightTable, linears: Iterable[str]) -> tuple[str, ...]:
    """Heads among `linears` that the models themselves lack: copies of the target's."""
    wanted = set(linears)
    return tuple(name for name in ("target.lm_head", "draft.lm_head") if name in wanted and name not in table)


def rank_shard(spec: WeightSpec, tp_size: int) -> WeightSpec:
    """Spec of the shard that each rank of `tp_size` holds."""
    if spec.sharding == "replicated":
        return spec
    if spec.sharding == "columns":
        return replace(spec, shape=(spec.shape[0], spec.shape[1] // tp_size))
    segments = tuple(max(part.units[0], part.shape[0] // tp_size) for part in segment_specs(spec))
    return replace(spec, shape=(sum(segments), *spec.shape[1:]), segments=segments)


def is_linear(spec: WeightSpec, name: str) -> bool:
    """True if a canonical tensor is the weight of a GEMM: no vector, embedding or biases of experts."""
    return len(spec.shape) == 2 and not name.endswith((".embedding", "_bias"))


def row_sharded(shape: tuple[int, ...], segments: tuple[int, ...] = (), units: tuple[int, ...] = ()) -> WeightSpec:
    """Spec with output features sharded; `segments` if the rows are fused parts, `units` if they are K/V heads."""
    return WeightSpec(shape=shape, sharding="rows", segments=segments or shape[:1], units=units)
