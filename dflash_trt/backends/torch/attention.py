"""Attention over pages in plain PyTorch: gather a request's pages, mask, scaled_dot_product_attention.

Requests with few query rows (verify blocks) share one padded call; each long prefill chunk gets a call of its own.
Everything that depends only on lengths is worked out once per step and page group, in an `AttentionPlan`, and reused by
all of its layers.

A weight of 0 does not hide NaN. Gathered rows that are not a request's own, of pages that others have or had, are
cleared: what is not finite in one request stays there.
"""

import torch
from torch import Tensor

from dflash_trt.backends.torch.attention_plan import AttentionPlan, BlockPlan, Gather, PageSlots, QueryGroup, Scratch
from dflash_trt.backends.torch.scores import PLAIN_SCORES, Scores, attend
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.network.state import Cache


def write_pages(cache: Cache[Tensor], slots: PageSlots, k: Tensor, v: Tensor) -> None:
    """k, v [N, kv_heads, D] into pages [pages, 2, page_size, kv_heads, D]."""
    pages, scales = cache.tensor, cache.spec.scales
    if scales is not None:
        # Bytes, because PyTorch moves no float8 rows on a CPU. The division is in float32 whatever k and v are.
        k, v = (e4m3(x.float() / scale).view(torch.uint8) for x, scale in ((k, scales.k), (v, scales.v)))
        pages = pages.view(torch.uint8)
    flat = pages.view(-1, *pages.shape[3:])
    flat.index_copy_(0, slots.k, k)
    flat.index_copy_(0, slots.v, v)


def attend_rows(
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache[Tensor],
    mask: AttentionMask,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """See `Ops.attend`, for rows that keep their K/V."""
    if k is not None and v is not None:
        write_pages(cache, plan.slots, k, v)
    num_heads, head_dim = q.shape[1:]
    out = None if plan.groups[0].rows is None else torch.empty_like(q)
    for group in plan.groups:
        num_requests, width = group.positions.shape
        queries = q if group.rows is None else q[group.rows]
        keys, values = read_pages(cache, group, q.dtype, plan.scratch)
        bias = causal_bias(group, mask, num_heads // cache.spec.num_kv_heads, q.dtype)
        attended = attend(queries.view(num_requests, width, num_heads, head_dim), keys, values, bias, scores)
        if out is None or group.rows is None:
            return attended.reshape(len(q), num_heads * head_dim)
        out[group.rows] = attended.reshape(-1, num_heads, head_dim)
    assert out is not None
    return out.view(len(q), num_heads * head_dim)


def attend_blocks(
    plan: BlockPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache[Tensor],
    mask: AttentionMask,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """`Ops.attend` for rows whose K/V live for this call only: over committed pages and the block itself."""
    num_requests, width = plan.group.positions.shape
    num_heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    keys, values = read_pages(cache, plan.group, q.dtype, plan.scratch)
    own_k, own_v = (x.view(num_requests, width, kv_heads, head_dim).transpose(1, 2) for x in (k, v))
    attended = attend(
        q.view(num_requests, width, num_heads, head_dim),
        torch.cat((keys, own_k), dim=2),
        torch.cat((values, own_v), dim=2),
        _block_bias(plan, mask, num_heads // kv_heads, q.dtype),
        scores,
    )
    return attended.reshape(len(q), num_heads * head_dim)


def read_pages(cache: Cache[Tensor], group: QueryGroup, dtype: torch.dtype, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """K and V of the group's requests, each [G, kv_heads, S, D]; rows past a request's end are 0.

    They are there until the next call.
    """
    scales = cache.spec.scales
    if scales is None:
        return _gathered(cache.tensor, group, scratch)
    k, v = _gathered(cache.tensor.view(torch.uint8), group, scratch)
    return k.view(torch.float8_e4m3fn).to(dtype) * scales.k, v.view(torch.float8_e4m3fn).to(dtype) * scales.v


def _gathered(pages: Tensor, group: QueryGroup, scratch: Scratch) -> tuple[Tensor, Tensor]:
    key = (pages.dtype, pages.shape[2:])
    gather = group.gathers.get(key)
    if gather is None:
        gather = group.gathers[key] = _gather(pages, group, scratch)
    torch.index_select(pages.view(-1, gather.into.shape[1]), 0, gather.rows, out=gather.into)
    if group.foreign_rows is not None:
        gather.foreign.index_fill_(1, group.foreign_rows, 0)
    return gather.kv


def _gather(pages: Tensor, group: QueryGroup, scratch: Scratch) -> Gather:
    num_requests, num_pages = group.page_ids.shape
    _, _, page_size, kv_heads, head_dim = pages.shape
    k_rows = group.page_ids.reshape(-1) * 2
    into = scratch.take(pages.view(-1, page_size * kv_heads * head_dim), len(k_rows))
    k, v = into.view(2, num_requests, num_pages * page_size, kv_heads, head_dim)[:, :, : group.num_keys].transpose(2, 3)
    return Gather(
        rows=torch.cat((k_rows, k_rows + 1)),
        into=into.view(2 * len(k_rows), -1),
        kv=(k, v),
        foreign=into.view(2, -1, kv_heads * head_dim),
    )


def causal_bias(group: QueryGroup, mask: AttentionMask, heads_per_kv: int, dtype: torch.dtype) -> Tensor | None:
    """None when nothing needs hiding: one request, one query, no window or chunk."""
    assert (
        mask.is_causal and not mask.is_window_anchored and not mask.first_key
    )  # targets are; other configs are refused
    key = _bias_key(mask, heads_per_kv)
    if key not in group.biases:
        num_requests, width = group.positions.shape
        if num_requests == 1 and width == 1 and mask.window is None and mask.chunk is None:
            group.biases[key] = None
        else:
            query = group.positions[:, :, None]
            key_positions = group.key_positions
            visible = key_positions <= query
            if mask.window is not None:
                visible &= query - key_positions < mask.window
            if mask.chunk is not None:
                visible &= query // mask.chunk == key_positions // mask.chunk
            group.biases[key] = _additive(visible, heads_per_kv, dtype)
    return group.biases[key]


def _bias_key(mask: AttentionMask, heads_per_kv: int) -> tuple[int | bool | None, ...]:
    """The mask's fields, whose hash costs a tenth of the model's own."""
    return mask.window, mask.chunk, mask.is_causal, mask.is_window_anchored, mask.first_key, heads_per_kv


def _block_bias(plan: BlockPlan, mask: AttentionMask, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """Context rows below the context length, then the block; the window is counted in true positions.

    An anchored window starts that many positions before the block, whichever slot asks, and covers all of the block.
    """
    group, key = plan.group, _bias_key(mask, heads_per_kv)
    if (known := group.biases.get(key)) is not None:
        return known
    num_requests, width = group.positions.shape
    context_lens = plan.context_lens[:, None, None]  # [R, 1, 1]
    query = group.positions[:, :, None]  # [R, S, 1]
    stored = group.key_positions.expand(num_requests, 1, -1)
    key_positions = torch.cat((stored, group.positions[:, None]), dim=2)  # [R, 1, keys + S]
    is_stored = torch.arange(group.num_keys + width) < group.num_keys
    visible = ~is_stored | ((key_positions < context_lens) & (key_positions >= mask.first_key))
    distance = query - key_positions
    if mask.is_causal:
        visible = visible & (distance >= 0)
    if mask.window is not None and mask.is_window_anchored:
        visible = visible & (key_positions >= context_lens - mask.window)
    elif mask.window is not None:
        visible = visible & (distance < mask.window) & (-distance < mask.window)
    bias = group.biases[key] = _additive(visible.expand(num_requests, width, -1), heads_per_kv, dtype)
    return bias


def _additive(visible: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """[G, Q, S] bool -> [G, 1, heads_per_kv * Q, S] of 0 and -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask.repeat(1, heads_per_kv, 1)[:, None]
