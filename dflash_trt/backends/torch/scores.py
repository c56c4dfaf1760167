"""Scores, their softmax and weighted sums over gathered keys: the arithmetic of attention on a CPU."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_trt.backends.torch.fixed_shapes import KEY_TILE, Pointwise, directly, in_vectors


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores and their softmax without the mask, as in `core.model.gqa.Gqa`.

    `scale` defaults to D ** -0.5.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]
    is_tiled: bool = False  # in calls of fixed shapes, see `fixed_shapes.py`

    @property
    def pointwise(self) -> Pointwise:
        return in_vectors if self.is_tiled else directly


PLAIN_SCORES: Final = Scores()


def attend(
    q: Tensor,  # [G, Q, heads, D]
    keys: Tensor,  # [G, kv_heads, S, D]
    values: Tensor,
    bias: Tensor | None,  # [G, 1, heads/kv_heads * Q, S], added to the scores
    scores: Scores,
) -> Tensor:
    """[G, Q, heads, D]. Query heads of one K/V head are stacked as rows, so K and V are not repeated."""
    width, stacked = q.shape[1], _stacked(q, keys.shape[1])
    sinks = None if scores.sinks is None else scores.sinks.float().repeat_interleave(width)
    if scores.softcap is not None:
        attended = _attend_with_softcap(stacked, keys, values, bias, sinks, scores)
    elif sinks is not None:
        attended = _attend_with_sinks(stacked, keys, values, bias, sinks, scores)
    else:
        attended = scaled_dot_product_attention(stacked, keys, values, attn_mask=bias, scale=scores.scale)
    return _unstacked(attended, width)


def attend_part(
    q: Tensor,  # [G, Q, heads, D]
    keys: Tensor,  # [G, kv_heads, S, D]
    values: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [G, Q, heads, D], float32 [G, Q, heads]
    """`attend` over some of the keys, with the logarithm of the sum of exp(scores)."""
    stacked = _stacked(q, keys.shape[1])
    attended, log_sums = _flash_attention(stacked, keys, values, attn_mask=bias, scale=scale)
    return _unstacked(attended, q.shape[1]), _unstacked(log_sums[..., None].float(), q.shape[1])[..., 0]


def _stacked(q: Tensor, kv_heads: int) -> Tensor:  # [G, kv_heads, heads / kv_heads * Q, D]
    num_requests, width, _, head_dim = q.shape
    if width == 1:  # in order as it is
        return q.view(num_requests, kv_heads, -1, head_dim)
    grouped = q.view(num_requests, width, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    return grouped.reshape(num_requests, kv_heads, -1, head_dim)  # rows: (head of the group, query)


def _unstacked(rows: Tensor, width: int) -> Tensor:  # [G, Q, heads, D]
    num_requests, kv_heads, _, head_dim = rows.shape
    if width == 1:
        return rows.reshape(num_requests, 1, -1, head_dim)
    unstacked = rows.view(num_requests, kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
    return unstacked.reshape(num_requests, width, -1, head_dim)


def _attend_with_sinks(
    stacked: Tensor,  # [G, kv_heads, heads/kv_heads * Q, D]
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    sinks: Tensor,  # float32 [heads * Q]
    scores: Scores,
) -> Tensor:
    """A sink adds exp(sink) to the sum Z of exp(scores): what is attended shrinks by Z / (Z + exp(sink))."""
    attended, log_z = _flash_attention(stacked, keys, values, attn_mask=bias, scale=scores.scale)
    share = scores.pointwise(torch.sigmoid, log_z - sinks.view(1, *stacked.shape[1:3]))
    return attended * share[..., None].to(attended.dtype)


def _flash_attention(*args: Tensor, attn_mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """The call that scaled_dot_product_attention makes on a CPU, and the log of each row's sum [G, kv_heads, M]."""
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *args, attn_mask=attn_mask, scale=scale
    )
    return result


def _attend_with_softcap(
    stacked: Tensor,  # [G, kv_heads, heads/kv_heads * Q, D]
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,  # float32 [heads * Q]
    scores: Scores,
) -> Tensor:
    """In steps, since scaled_dot_product_attention has no soft cap. float32 inside."""
    assert scores.softcap is not None
    scale = stacked.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    products = _products(stacked.float(), keys.float(), scores.is_tiled)
    logits = scores.softcap * scores.pointwise(torch.tanh, products * (scale / scores.softcap))
    if bias is not None:
        logits = logits + bias
    if sinks is not None:  # the last column, which has no value
        sink = sinks.view(1, *stacked.shape[1:3], 1).expand(len(logits), -1, -1, -1)
        logits = torch.cat((logits, sink), dim=3)
    weights = logits.softmax(dim=3)[..., : keys.shape[2]]
    return _weighted(weights, values.float(), scores.is_tiled).to(values.dtype)


def _products(q: Tensor, keys: Tensor, is_tiled: bool) -> Tensor:  # [G, kv_heads, M, S]
    if not is_tiled:
        return q @ keys.transpose(2, 3)
    return torch.cat([_one_by_one(q, tile.transpose(2, 3)) for tile in torch.split(keys, KEY_TILE, dim=2)], dim=3)


def _weighted(weights: Tensor, values: Tensor, is_tiled: bool) -> Tensor:  # [G, kv_heads, M, D]
    if not is_tiled:
        return weights @ values
    tiles = zip(torch.split(weights, KEY_TILE, dim=3), torch.split(values, KEY_TILE, dim=2), strict=True)
    first, *others = (_one_by_one(*tile) for tile in tiles)
    return sum(others, start=first)


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, one request in each call."""
    return torch.cat([x @ y for x, y in zip(torch.split(a, 1), torch.split(b, 1), strict=True)])
