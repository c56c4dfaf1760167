"""Canonical weights: name, shape and sharding of every tensor of an engine.

The specs of `core/model` name them, `checkpoint/` fills the table from foreign names, `engine_dir` stores it and
`network/` reads it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from dflash_trt.core.dtype import DType, FloatDType
from dflash_trt.core.mapping import Mapping

Sharding = Literal["replicated", "rows", "columns"]
Division = Literal["group", "all", "groups"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """A tensor of the whole model, and how it is sharded over ranks.

    `rows` shards output features, `columns` input features (an all-reduce sums the partial results): axes 0 and 1, or 1
    and 2 where axis 0 has `num_experts`, of which each rank has some. `segments` are the row counts of parts fused
    along the axis of rows, each sharded on its own, such as q, k and v. `units` are the rows of each segment that stay
    together (default: 1), such as a K/V head's: with fewer units than ranks, several ranks hold the same unit.

    `divided_by` differs where ranks have requests of their own (`Mapping.dp_size`): the ranks of each group divide the
    tensor, or all ranks do, or each group has a part of it.
    """

    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    segments: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    num_experts: int = 0
    divided_by: Division = "group"
    is_integer: bool = False  # token ids: never cast to the engine's dtype
    is_float32: bool = False  # whatever the engine's dtype
    is_plain: bool = False  # a matrix that no engine has quantized: more than the weight of a GEMM, or a single row

    @property
    def row_axis(self) -> int:
        return 1 if self.num_experts else 0

    def stored_dtype(self, dtype: FloatDType) -> DType:
        """In an engine of this dtype."""
        return "int64" if self.is_integer else "float32" if self.is_float32 else dtype

    def matrix_dtype(self, name: str, dtype: FloatDType, weights_dtype: FloatDType | None) -> DType:
        """In an engine of this dtype that stores its matrices in `weights_dtype`, if that is not None."""
        is_matrix = (is_linear(self, name) or name.endswith(".embedding")) and not (self.is_integer or self.is_float32)
        return weights_dtype if weights_dtype is not None and is_matrix else self.stored_dtype(dtype)


WeightTable = dict[str, WeightSpec]


def segments_of(spec: WeightSpec) -> tuple[int, ...]:
    """Rows per fused part; one segment for a linear layer that is not fused."""
    return spec.segments or (spec.shape[spec.row_axis],)


@lru_cache(maxsize=1024)  # layers are alike
def segment_specs(spec: WeightSpec) -> tuple[WeightSpec, ...]:
    """Each fused part as a tensor of its own."""
    segments = segments_of(spec)
    units = spec.units or (1,) * len(segments)
    return tuple(
        replace(_with_rows(spec, rows), segments=(rows,), units=(unit,))
        for rows, unit in zip(segments, units, strict=True)
    )


def extra_heads(table: WeightTable, linears: Iterable[str]) -> tuple[str, ...]:
    """Heads among `linears` that the models themselves lack: copies of the target's."""
    wanted = set(linears)
    return tuple(name for name in ("target.lm_head", "draft.lm_head") if name in wanted and name not in table)


@lru_cache(maxsize=1024)  # layers are alike
def rank_shard(spec: WeightSpec, mapping: Mapping) -> WeightSpec:
    """Spec of the shard that each rank holds."""
    _, num_ranks = place_of(spec, mapping)
    if spec.num_experts:
        num_ranks, num_experts = mapping.moe_tp_size, spec.num_experts // mapping.ep_size
        spec = replace(spec, num_experts=num_experts, shape=(num_experts, *spec.shape[1:]))
    if spec.sharding == "replicated":
        return spec
    if spec.sharding == "columns":
        *leading, columns = spec.shape
        return replace(spec, shape=(*leading, columns // num_ranks))
    segments = tuple(max(part.units[0], segments_of(part)[0] // num_ranks) for part in segment_specs(spec))
    return replace(_with_rows(spec, sum(segments)), segments=segments)


def place_of(spec: WeightSpec, mapping: Mapping) -> tuple[int, int]:
    """This rank's number among those that divide the tensor, and how many they are. For experts see `Mapping`."""
    return {
        "group": (mapping.tp_rank, mapping.tp_size),
        "all": (mapping.expert_rank, mapping.num_expert_ranks),
        "groups": (mapping.dp_rank, mapping.dp_size),
    }[spec.divided_by]


def is_linear(spec: WeightSpec, name: str) -> bool:
    """True for the weight of a GEMM, or of one per expert.

    False for vectors, biases, embeddings and filters.
    """
    has_matrices = len(spec.shape) == 2 + spec.row_axis
    return has_matrices and not spec.is_plain and not name.endswith((".embedding", "_bias", ".conv"))


def row_sharded(
    shape: tuple[int, ...],
    segments: tuple[int, ...] = (),
    units: tuple[int, ...] = (),
    *,
    divided_by: Division = "group",
) -> WeightSpec:
    """Spec with output features sharded; `segments` for fused parts, `units` for K/V heads."""
    return WeightSpec(shape=shape, sharding="rows", segments=segments or shape[:1], units=units, divided_by=divided_by)


def embedding_table(vocab_size: int, width: int) -> WeightSpec:
    """Spec of an embedding, which only ranks with requests of their own divide, by vocabulary."""
    return row_sharded((vocab_size, width), divided_by="groups")


def _with_rows(spec: WeightSpec, rows: int) -> WeightSpec:
    axis = spec.row_axis
    return replace(spec, shape=(*spec.shape[:axis], rows, *spec.shape[axis + 1 :]))
