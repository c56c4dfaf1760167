"""The ops of `--deterministic`: a row's bits depend on its request alone, in every dtype.

What `TorchOps` computes in calls of any shape is computed in calls of fixed shapes (`fixed_shapes.py`), so that K,
batch mates, chunks and prefix hits change no token. Norms, softmax and the sampler work row by row anyway.
"""

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.fixed_shapes import BlockHeights, in_blocks, in_vectors
from dflash_trt.backends.torch.gated_delta_fixed import gated_delta_in_order
from dflash_trt.backends.torch.moe import Choice, activated, run_chosen_experts, unpacked_expert
from dflash_trt.backends.torch.native.linear import NativeLinear
from dflash_trt.backends.torch.native.ops import NativeOps
from dflash_trt.backends.torch.ops import TorchOps
from dflash_trt.backends.torch.process_group import summed_in_order
from dflash_trt.backends.torch.quantized_linear import DequantizedWeight
from dflash_trt.core.model.feed_forward import Moe
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.formats.int8 import Int8Weight
from dflash_trt.network.ops import DeltaParameters, Experts, Linear, Rows
from dflash_trt.network.state import RecurrentCache


class DeterministicOps(TorchOps):
    """Implements `Ops[Tensor]` for one step."""

    has_fixed_shapes = True
    _heights = BlockHeights()  # shared by the process

    def linear(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        compute = partial(super().linear, linear=linear)
        if _sums_in_order(linear):
            return compute(x)
        return in_blocks(compute, x, self._heights.of(_kind(linear), compute, x))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return in_vectors(F.silu, gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return in_vectors(partial(F.gelu, approximate="tanh"), gate).mul_(up)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return in_vectors(Tensor.tanh, x.float() / cap).mul_(cap)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * in_vectors(torch.sigmoid, gate)

    def gated_delta(
        self,
        qkvz: Tensor,
        ba: Tensor,
        parameters: DeltaParameters[Tensor],
        rows: Rows[Tensor],
        cache: RecurrentCache[Tensor],
        spec: GatedDelta,
        eps: float,
    ) -> Tensor:
        return gated_delta_in_order(qkvz, ba, parameters, self._slot_rows, cache, spec, eps)

    def _run_experts(self, x: Tensor, experts: Experts[Tensor], moe: Moe, choice: Choice) -> Tensor:
        activate = partial(activated, pointwise=in_vectors)
        return run_chosen_experts(x, experts, moe, choice, self._expert, activate)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self._ranks.num_ranks == 1 else summed_in_order(self._ranks, x)

    def _expert(self, x: Tensor, linear: Linear[Tensor]) -> Tensor:
        return self.linear(x, unpacked_expert(linear, x.dtype))


class DeterministicNativeOps(NativeOps, DeterministicOps):
    """`DeterministicOps` with the CPU kernels, of which no row's bits depend on the other rows of a call."""


def _kind(linear: Linear[Tensor]) -> Hashable:
    """Properties of a linear layer that a GEMM library chooses its kernel by."""
    weight = linear.weight
    pieces = [piece.linear.weight for piece in weight.pieces] if isinstance(weight, DequantizedWeight) else [weight]
    layouts = tuple((piece.shape, piece.is_mkldnn) for piece in pieces if isinstance(piece, Tensor))
    return type(linear), type(weight), layouts, linear.bias is None


def _sums_in_order(linear: Linear[Tensor]) -> bool:
    """The CPU kernels add up a row's products in order, however many rows there are; sums of integers are exact."""
    weight = linear.weight
    if isinstance(weight, Int8Weight):
        return True
    if isinstance(weight, DequantizedWeight):
        return all(isinstance(piece.linear, NativeLinear) for piece in weight.pieces)
    return isinstance(linear, NativeLinear)
