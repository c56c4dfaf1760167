"""Sums and joins over the ranks of a network: TensorRT's own layer, or nodes of the plugin library.

All ranks take part: TensorRT 11.2 fails on groups that are a subset of the world. `num_ranks` is set before a layer's
output is read, because TensorRT derives the output's shape from it.
"""

from typing import Any, Protocol

from dflash_trt.backends.tensorrt.layers import ITensor, Layers
from dflash_trt.backends.tensorrt.plugins import AddNode
from dflash_trt.core.config import CollectiveMode
from dflash_trt.kernels.programs import ALL_GATHER, ALL_REDUCE
from dflash_trt.kernels.programs.program import Program


class Collectives(Protocol):
    """The exchanges of a rank, the same on all ranks and in the same order."""

    num_ranks: int

    def all_reduce(self, x: ITensor) -> ITensor:
        """[N, C] -> the sum over the ranks, [N, C]."""
        ...

    def all_gather(self, x: ITensor) -> ITensor:
        """[N, C] -> [ranks * N, C], rank 0's rows first."""
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

    def _add(self, x: ITensor, name: str, reduction: Any) -> ITensor:
        operation = getattr(self._layers.trt.CollectiveOperation, name)
        layer = self._layers.add_layer("add_dist_collective", x, operation, reduction, -1, [])
        layer.num_ranks = self.num_ranks
        layer.name = f"{name} #{self._layers.network.num_layers - 1}"
        return self._layers.output_of(layer)


class PluginCollectives:
    """Nodes of `AllReduce` and `AllGather`."""

    def __init__(self, layers: Layers, num_ranks: int, add_node: AddNode) -> None:
        self.num_ranks = num_ranks
        self._layers = layers
        self._add_node = add_node

    def all_reduce(self, x: ITensor) -> ITensor:
        return self._add(x, ALL_REDUCE)

    def all_gather(self, x: ITensor) -> ITensor:
        return self._add(x, ALL_GATHER)

    def _add(self, x: ITensor, program: Program) -> ITensor:
        name = f"{program.name} #{self._layers.network.num_layers}"
        return self._add_node(self._layers, program, name, [x], {"num_ranks": self.num_ranks})[0]
