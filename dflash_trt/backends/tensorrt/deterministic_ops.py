"""The ops of `build --deterministic`: a row's bits depend on its request alone.

What adds up numbers of a row is a node of the plugin library: linear layers and experts with fixed tiles, norms,
attention in splits of a fixed length, gated delta nets token by token. TensorRT's own layers are left with one number
at a time, and with moving numbers. The target alone computes so: drafts decide how fast a text comes, and never which.
"""

from functools import reduce
from typing import Any, Final

from dflash_trt.backends.tensorrt.layers import Handle, ITensor
from dflash_trt.backends.tensorrt.ops import TrtOps
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.network.ops import Linear

_OF_TARGET: Final = "target."  # canonical names of weights begin with the model's role


class DeterministicTrtOps(TrtOps):
    """Implements `Ops[Handle]` for one network."""

    def __init__(self, *given: Any, rank: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self._rank = rank

    def linear(self, x: ITensor, linear: Linear[Handle]) -> ITensor:
        if isinstance(linear.weight, Int8Weight) or not linear.name.startswith(_OF_TARGET):
            return super().linear(x, linear)  # sums of integers are exact
        return self._lowering.linear(x, linear)

    def _head_product(self, x: ITensor, factor: ITensor, *, is_transposed: bool = False) -> ITensor:
        return self._lowering.head_product(x, self._layers.transpose(factor, (0, 2, 1)) if is_transposed else factor)

    def rms_norm(self, x: ITensor, weight: Handle, eps: float) -> ITensor:
        return self._normed_rows(x, self._layers.cast(self._layers.tensor(weight), "float32"), eps)

    def unweighted_rms_norm(self, x: ITensor, eps: float) -> ITensor:
        return self._normed_rows(x, self._ones(x.shape[-1]), eps)

    def joint_rms_norm(self, x: ITensor, weight: Handle, eps: float) -> ITensor:
        """Over the features of all ranks, each of which has the weight of its own."""
        layers, size = self._layers, x.shape[-1]
        if self._collectives is None:
            return self.rms_norm(x, weight, eps)
        weights = [self._ones(size)] * self._collectives.num_ranks
        weights[self._rank] = layers.cast(layers.tensor(weight), "float32")
        normed = self._normed_rows(self.gathered_columns(x), layers.concat(weights, 0), eps)
        return layers.slice(normed, 1, self._rank * size, size)

    def _normed_rows(self, x: ITensor, weight: ITensor, eps: float) -> ITensor:
        if len(x.shape) == 2:
            return self._lowering.rms_norm(x, weight, eps)
        rows = self._layers.reshape(x, (-1, x.shape[-1]))
        return self._layers.reshape(self._lowering.rms_norm(rows, weight, eps), (-1, *tuple(x.shape)[1:]))

    def _ones(self, size: int) -> ITensor:  # float32 [size]
        return self._layers.floats([1.0] * size, (size,))

    def all_reduce(self, x: ITensor) -> ITensor:
        """In float32, in the order of the ranks."""
        if self._collectives is None:
            return x
        layers, size = self._layers, x.shape[-1]
        joined = layers.cast(self.gathered_columns(x), "float32")
        parts = [layers.slice(joined, 1, rank * size, size) for rank in range(self._collectives.num_ranks)]
        return layers.cast_like(reduce(lambda a, b: layers.binary("SUM", a, b), parts), x)
