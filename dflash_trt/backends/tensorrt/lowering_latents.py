"""Latent attention in TensorRT: the products around a node, and attention over latent pages in plain layers.

Absorbed: the key's factor goes into the queries and the value's factor behind the sums, so that all heads attend over
the latents themselves. A node attends directly for prompts that begin; theirs is added behind the value's factor.
`torch/latent_attention.py` is the definition.
"""

from dflash_trt.backends.tensorrt.layers import Handle, ITensor, Layers
from dflash_trt.backends.tensorrt.lowering_attention import StepIndex
from dflash_trt.backends.tensorrt.lowering_pages import Pages
from dflash_trt.backends.tensorrt.stateful_lowering import StatefulLowering
from dflash_trt.core.model.mla import Mla
from dflash_trt.network.ops import Rows
from dflash_trt.network.state import LatentCache


class LatentOps:
    """A part of `Ops[Handle]`, for one network."""

    _layers: Layers
    _lowering: StatefulLowering

    def pairs_to_halves(self, x: ITensor) -> ITensor:
        layers, heads, size = self._layers, x.shape[1], x.shape[2]
        pairs = layers.reshape(x, (-1, heads, size // 2, 2))
        return layers.reshape(layers.transpose(pairs, (0, 1, 3, 2)), (-1, heads, size))

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
        absorbed = layers.matmul(by_heads, k_factor)  # [heads, N, latent_dim]
        q = layers.concat((layers.transpose(absorbed, (1, 0, 2)), q_rope), 2)
        own = layers.concat((latents, layers.reshape(k_rope, (-1, mla.rope_dim))), 1)
        given = (q, by_heads), own, (k_factor, v_factor)
        attended, direct = self._lowering.attend_latents(*given, cache, mla.scale)
        values = layers.matmul(layers.transpose(attended, (1, 0, 2)), v_factor, is_b_transposed=True)
        heads = layers.transpose(values, (1, 0, 2))  # [N, heads, v_head_dim]
        if direct is not None:
            heads = layers.binary("SUM", heads, direct)
        return layers.reshape(heads, (-1, heads.shape[1] * mla.v_head_dim))


def attend_latents(
    layers: Layers,
    index: StepIndex,
    q: ITensor,  # [T, heads, latent_dim + rope_dim], absorbed
    own: ITensor,  # [T, latent_dim + rope_dim]: what the rows' positions hold from now on
    cache: LatentCache[ITensor],
    score_scale: float,
) -> tuple[ITensor, Pages]:
    """Sums of latents [T, heads, latent_dim], and the pages with the rows written."""
    pages = Pages(cache.tensor, cache.spec.scales)  # [pages, page_size, latent_dim + rope_dim]
    codes = layers.scatter_nd(pages.codes(layers), _slots(layers, index), pages.key_rows(layers, own))
    pages = pages.with_codes(layers, codes)
    gathered = layers.gather(pages.codes(layers), index.page_table_of_row)  # [T, P, page_size, row]
    stored = pages.values(layers, gathered, is_value=False, like=q)
    keys = layers.cast(layers.reshape(stored, (-1, index.num_keys, own.shape[1])), "float32")
    is_hidden = layers.binary("GREATER", index.key_positions, layers.reshape(index.positions, (-1, 1)))  # [T, S]
    visible = layers.reshape(layers.unary("NOT", is_hidden), (-1, 1, index.num_keys))
    # Pages hold what others left there, and a weight of 0 does not hide NaN.
    keys = layers.where(layers.reshape(visible, (-1, index.num_keys, 1)), keys, layers.like(0.0, keys))
    scaled = layers.binary("PROD", layers.cast(q, "float32"), score_scale)
    scores = layers.matmul(scaled, keys, is_b_transposed=True)  # [T, heads, S]
    weights = layers.softmax(layers.where(visible, scores, layers.like(float("-inf"), scores)), 2)
    values = layers.slice(keys, 2, 0, cache.spec.latent_dim)
    return layers.cast_like(layers.matmul(weights, values), q), pages


def _slots(layers: Layers, index: StepIndex) -> ITensor:
    """int32 [T, 2]: page and offset of every row, those of its K."""
    page, _, offset = (layers.slice(index.kv_slots, 1, column, 1) for column in range(3))  # of K, then of V
    both = layers.concat((page, offset), 1)
    return layers.slice(both, 0, 0, layers.dim(index.positions, 0))
