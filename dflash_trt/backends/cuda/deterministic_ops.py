"""The ops of `--deterministic` on a GPU: a row's bits depend on its request alone, in every dtype.

Attention has splits of a fixed length, gated delta nets go token by token, and sums over ranks have one order. Linears
and experts were prepared with fixed tiles at load. Norms, rotations, codes and the sampler work row by row anyway. The
target alone computes so: drafts decide how fast a text comes, and never which.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from dflash_trt.backends.cuda.gated_delta import apply_gated_delta
from dflash_trt.backends.cuda.handles import Heads, Norm, Value, tensor_of
from dflash_trt.backends.cuda.latent_attention import attend_latent_in_splits
from dflash_trt.backends.cuda.ops import TorchGpuOps
from dflash_trt.backends.torch.process_group import summed_in_order
from dflash_trt.core.model.gated_delta import GatedDelta
from dflash_trt.core.model.mla import Mla
from dflash_trt.kernels.attention_plan import AttentionOptions
from dflash_trt.network.ops import DeltaParameters, Rows
from dflash_trt.network.state import LatentCache, RecurrentCache


class DeterministicGpuOps(TorchGpuOps):
    """Implements `Ops[Value]` for one step."""

    def token_rows(self) -> Rows[Any]:
        rows, splits = super().token_rows(), self._resources.splits
        assert splits is not None
        num_rows = len(rows.positions)
        index = tuple(replace(group, pieces=tuple(splits.pieces(group.requests, num_rows))) for group in rows.index)
        return replace(rows, index=index)

    def gated_delta(
        self,
        qkvz: Value,
        ba: Value,
        parameters: DeltaParameters[Any],
        rows: Rows[Any],
        cache: RecurrentCache[Any],
        spec: GatedDelta,
        eps: float,
    ) -> Tensor:
        assert self._slots is not None
        given = tensor_of(qkvz), tensor_of(ba), parameters, rows, self._slots, cache, eps
        return apply_gated_delta(*given, is_in_order=True)

    def attend_latent(
        self,
        q_nope: Value,
        q_rope: Value,
        latents: Value,
        k_rope: Value,
        kv_b: Value,
        rows: Rows[Any],
        cache: LatentCache[Any],
        mla: Mla,
    ) -> Tensor:
        assert isinstance(q_nope, Heads) and isinstance(q_rope, Heads) and isinstance(k_rope, Heads)
        assert isinstance(latents, Norm) and self._resources.splits is not None
        memory, workspace = self._resources.latents, self._resources.attention_workspace
        given = (q_nope, q_rope), (latents, k_rope), tensor_of(kv_b), rows, cache, mla, memory, workspace
        return attend_latent_in_splits(*given, split_length=self._resources.splits.split_length)

    def all_reduce(self, x: Value) -> Tensor:
        rows = tensor_of(x)
        return rows if self._ranks.num_ranks == 1 else summed_in_order(self._ranks, rows)

    def _row_options(self, options: AttentionOptions) -> AttentionOptions:
        assert self._resources.splits is not None
        return replace(options, split_length=self._resources.splits.split_length)
