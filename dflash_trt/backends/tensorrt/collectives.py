"""Sums, joins and exchanges over the ranks of a network: TensorRT's own layer, or nodes of the plugin library.

All ranks take part: TensorRT 11.2 fails on groups that are a subset of the world. `num_ranks` is set before a layer's
output is read, because TensorRT derives the output's shape from it.
"""

from functools import reduce
from typing import Any, Protocol

from dflash_trt.backends.tensorrt.layers import Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.plugins import AddNode
from dflash_trt.core.config import CollectiveMode
from dflash_trt.kernels.programs import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from dflash_trt.kernels.programs.program import Program


class Collectives(Protocol):
    """The exchanges of a rank, the same on all ranks and in the same order."""

    num_ranks: int

    def all_reduce(self, x: ITensor) -> ITensor:
        """[N, C] -> the sum over the ranks, [N, C]."""
        ...

    def all_gather(self, x: ITensor) -> ITensor:
        """[N, C], int32 too -> [ranks * N, C], rank 0's rows first."""
        ...

    def reduce_scatter(self, x: ITensor) -> ITensor:
        """[ranks * N, C] -> the sum over the ranks of this rank's rows, [N, C]."""
        ...

    def all_to_all(self, x: ITensor) -> ITensor:
        """[ranks * N, C], rows for rank 0 first -> the rows for this one, [ranks * N, C], rank 0's first."""
        ...


def make_collectives(layers: Layers, *, num_ranks: int, mode: CollectiveMode, add_node: AddNode) -> Collectives | None:
    """Collectives of `mode`; None for one rank."""
    if num_ranks == 1:
        return None
    return NativeCollectives(layers, num_ranks) if mode == "native" else PluginCollectives(layers, num_ranks, add_node)


class NativeCollectives:
    """`IDistCollectiveLayer`s. Layers are named after their operation, which they do not show otherwise."""

    def __init__(self, layers: Layers, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._layers = layers

    def all_reduce(self, x: ITensor) -> ITensor:
        return self._add(x, "ALL_REDUCE", self._layers.trt.ReduceOperation.SUM)

    def all_gather(self, x: ITensor) -> ITensor:
        return self._add(x, "ALL_GATHER", self._layers.trt.ReduceOperation.NONE)

    def reduce_scatter(self, x: ITensor) -> ITensor:
        return self._add(x, "REDUCE_SCATTER", self._layers.trt.ReduceOperation.SUM)

    def all_to_all(self, x: ITensor) -> ITensor:
        return self._add(x, "ALL_TO_ALL", self._layers.trt.ReduceOperation.NONE)

    def _add(self, x: ITensor, name: str, reduction: Any) -> ITensor:
        operation = getattr(self._layers.trt.CollectiveOperation, name)
        layer = self._layers.add_layer("add_dist_collective", x, operation, reduction, -1, [])
        layer.num_ranks = self.num_ranks
        layer.name = f"{name} #{self._layers.network.num_layers - 1}"
        return self._layers.output_of(layer)


class PluginCollectives:
    """Nodes of `AllReduce`, `AllGather`, `ReduceScatter` and `AllToAll`."""

    def __init__(self, layers: Layers, num_ranks: int, add_node: AddNode) -> None:
        self.num_ranks = num_ranks
        self._layers = layers
        self._add_node = add_node

    def all_reduce(self, x: ITensor) -> ITensor:
        return self._add(x, ALL_REDUCE)

    def all_gather(self, x: ITensor) -> ITensor:
        if x.dtype != self._layers.trt.DataType.INT32:
            return self._add(x, ALL_GATHER)
        floats = self._layers.cast(x, "float32")  # exact for ids of a vocabulary
        return self._layers.cast_like(self._add(floats, ALL_GATHER), x)

    def reduce_scatter(self, x: ITensor) -> ITensor:
        return self._add(self._by_rank(x), REDUCE_SCATTER)

    def all_to_all(self, x: ITensor) -> ITensor:
        return self._layers.reshape(self._add(self._by_rank(x), ALL_TO_ALL), (-1, x.shape[1]))

    def _by_rank(self, x: ITensor) -> ITensor:
        return self._layers.reshape(x, (self.num_ranks, -1, x.shape[1]))

    def _add(self, x: ITensor, program: Program) -> ITensor:
        name = f"{program.name} #{self._layers.network.num_layers}"
        return self._add_node(self._layers, program, name, [x], {"num_ranks": self.num_ranks})[0]


class SharedRows:
    """Rows that all ranks compute together, where ranks have requests of their own.

    A step has as many rows on each rank: what a rank has less than another is padding.
    """

    def __init__(self, layers: Layers, collectives: Collectives, *, rank: int, is_in_order: bool) -> None:
        """With `is_in_order`, sums are made in float32 and in the order of the ranks."""
        self._layers = layers
        self._collectives = collectives
        self._rank = rank
        self._is_in_order = is_in_order

    def all_gather(self, x: ITensor) -> ITensor:
        """[N, H] or [N] of this rank -> those of all ranks, rank 0's first."""
        if len(x.shape) == 2:
            return self._collectives.all_gather(x)
        return self._layers.reshape(self._collectives.all_gather(self._layers.reshape(x, (-1, 1))), (-1,))

    def reduce_scatter(self, x: ITensor) -> ITensor:
        """Each rank's part [ranks * N, H] of all rows -> the sum of this rank's rows [N, H]."""
        if not self._is_in_order:
            return self._collectives.reduce_scatter(x)
        layers = self._layers
        parts = layers.reshape(layers.cast(self._collectives.all_to_all(x), "float32"), self._by_rank(x))
        rows = [layers.slice(parts, 0, rank, 1) for rank in range(self._collectives.num_ranks)]
        summed = reduce(lambda a, b: layers.binary("SUM", a, b), rows)
        return layers.cast_like(layers.reshape(summed, (-1, x.shape[1])), x)

    def own_rows(self, x: ITensor) -> ITensor:
        """Each rank's columns [ranks * N, C] of all rows -> all columns [N, ranks * C] of this rank's rows."""
        layers, num_ranks = self._layers, self._collectives.num_ranks
        by_rank = layers.reshape(self._collectives.all_to_all(x), self._by_rank(x))
        return layers.reshape(layers.transpose(by_rank, (1, 0, 2)), (-1, num_ranks * x.shape[1]))

    def part_of_embedding(self, table: Handle, token_ids: ITensor) -> ITensor:
        """Rows of the tokens that this rank's part of an embedding has, and zeros for the others."""
        layers, num_tokens = self._layers, table.shape[0]
        local = layers.binary("SUB", token_ids, self._rank * num_tokens)
        nearest = layers.clamp(local, 0, num_tokens - 1)
        rows = layers.gather(layers.tensor(table), nearest)
        is_own = layers.reshape(layers.binary("EQUAL", local, nearest), (-1, 1))
        return layers.where(is_own, rows, layers.like(0.0, rows))

    def _by_rank(self, x: ITensor) -> tuple[int, ...]:
        return self._collectives.num_ranks, -1, x.shape[1]
