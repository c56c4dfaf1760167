"""Latent attention in TensorRT: products around a node.

Absorbed: the key's factor is applied to the queries and the value's factor after the sums, so that all heads attend
over the latents themselves. The node attends directly for prompts that begin; their results are added after the value's
factor. `torch/latent_attention.py` is the definition.
"""

from dflash_trt.backends.tensorrt.layers import Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.plugins import PluginLowering
from dflash_trt.core.model.mla import Mla
from dflash_trt.network.ops import Rows
from dflash_trt.network.state import LatentCache


class LatentOps:
    """A part of `Ops[Handle]`, for one network."""

    _layers: Layers
    _lowering: PluginLowering

    def pairs_to_halves(self, x: ITensor) -> ITensor:
        layers, heads, size = self._layers, x.shape[1], x.shape[2]
        pairs = layers.reshape(x, (-1, heads, size // 2, 2))
        return layers.reshape(layers.transpose(pairs, (0, 1, 3, 2)), (-1, heads, size))

    def _head_product(self, x: ITensor, factor: ITensor, *, is_transposed: bool = False) -> ITensor:
        """[N, heads, in] and [heads, in, out] -> [N, heads, out]."""
        layers = self._layers
        product = layers.matmul(layers.transpose(x, (1, 0, 2)), factor, is_b_transposed=is_transposed)
        return layers.transpose(product, (1, 0, 2))

    def attend_latent(
        self,
        q_nope: ITensor,
        q_rope: ITensor,
        latents: ITensor,
        k_rope: ITensor,
        kv_b: Handle,
        rows: Rows[ITensor],
        cache: LatentCache[ITensor],
        mla: Mla,
    ) -> ITensor:
        assert rows.keeps_kv, "a draft block has no latents"
        layers = self._layers
        factors = layers.reshape(layers.tensor(kv_b), (-1, mla.nope_dim + mla.v_head_dim, mla.latent_dim))
        k_factor = layers.slice(factors, 1, 0, mla.nope_dim)
        v_factor = layers.slice(factors, 1, mla.nope_dim, mla.v_head_dim)
        by_heads = layers.transpose(q_nope, (1, 0, 2))  # [heads, N, nope_dim]
        q = layers.concat((self._head_product(q_nope, k_factor), q_rope), 2)
        own = layers.concat((latents, layers.reshape(k_rope, (-1, mla.rope_dim))), 1)
        given = (q, by_heads), own, (k_factor, v_factor)
        attended, direct = self._lowering.attend_latents(*given, cache, mla.scale)
        values = self._head_product(attended, v_factor, is_transposed=True)
        heads = layers.binary("SUM", values, direct)  # [N, heads, v_head_dim]
        return layers.reshape(heads, (-1, heads.shape[1] * mla.v_head_dim))
