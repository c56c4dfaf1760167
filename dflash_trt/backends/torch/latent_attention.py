"""Attention over latents in PyTorch: the definition that every other backend must match.

Absorbed, for few rows: the key factor Bk is applied to the query and the value factor Bv after the sum, so that all
heads attend over the latents themselves. Direct, for the long rows of a prompt: K and V of every head are computed
once. The results are equal; sizes decide which one is cheaper. Rows in calls of fixed shapes are always absorbed: the
shapes of the direct form's products follow the number of keys.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.attention import causal_bias
from dflash_trt.backends.torch.attention_plan import AttentionPlan, QueryGroup
from dflash_trt.backends.torch.divided_context import exchanged_parts, gathered_heads, joined_parts, own_groups
from dflash_trt.backends.torch.process_group import ONE_RANK, RankGroup
from dflash_trt.backends.torch.scores import Scores, attend, attend_part
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.core.model.mla import Mla
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.network.state import LatentCache

_FULL = AttentionMask()


def attend_latent(
    plan: AttentionPlan,
    q_nope: Tensor,  # [N, heads, nope_dim]
    q_rope: Tensor,  # [N, heads, rope_dim]
    latents: Tensor,  # [N, latent_dim]
    k_rope: Tensor,  # [N, 1, rope_dim]
    kv_b: Tensor,  # [heads * (nope_dim + v_head_dim), latent_dim]
    cache: LatentCache[Tensor],
    mla: Mla,
    ranks: RankGroup = ONE_RANK,
    *,
    is_tiled: bool = False,  # the rows of the plan are in calls of fixed shapes, see `fixed_shapes.py`
) -> Tensor:  # [N, heads * v_head_dim]
    """See `Ops.attend_latent`."""
    _write_pages(cache, plan, torch.cat((latents, k_rope.flatten(1)), -1), ranks)
    k_factor, v_factor = kv_b.view(-1, mla.nope_dim + mla.v_head_dim, mla.latent_dim).split_with_sizes(
        (mla.nope_dim, mla.v_head_dim), 1
    )  # [heads, nope_dim or v_head_dim, latent_dim]
    if cache.spec.num_parts > 1:
        queries = torch.cat((_by_heads("nhd,hdr->nhr", q_nope, k_factor, is_tiled), q_rope), -1)
        attended = _over_all_ranks(plan, queries, cache, mla, ranks, is_tiled=is_tiled)
        return _by_heads("nhr,hdr->nhd", attended, v_factor, is_tiled).flatten(1)
    out = latents.new_empty(len(q_nope), len(k_factor), mla.v_head_dim)
    for group in plan.groups:
        width = group.positions.shape[1]
        rows = slice(None) if group.rows is None else group.rows
        stored = _read_pages(cache, group, latents.dtype)
        form = _directly if not is_tiled and is_direct_cheaper(mla, width) else partial(_absorbed, is_tiled=is_tiled)
        shape = (len(stored), width, len(k_factor), -1)
        attended = form(q_nope[rows].view(shape), q_rope[rows].view(shape), stored, k_factor, v_factor, group, mla)
        out[rows] = attended.reshape(-1, *out.shape[1:])
    return out.flatten(1)


def _over_all_ranks(
    plan: AttentionPlan,
    queries: Tensor,  # [N, heads, latent_dim + rope_dim], of this rank's heads
    cache: LatentCache[Tensor],
    mla: Mla,
    ranks: RankGroup,
    *,
    is_tiled: bool,
) -> Tensor:  # [N, heads, latent_dim]
    """Absorbed, for all rows: see `divided_context.py`."""
    of_all = gathered_heads(queries, ranks)
    attended = of_all.new_empty(*of_all.shape[:2], mla.latent_dim)
    log_sums = of_all.new_full(of_all.shape[:2], -torch.inf, dtype=torch.float32)
    groups = own_groups(plan, ranks, page_size=cache.tensor.shape[1], is_tiled=is_tiled)
    for group, own in zip(plan.groups, groups, strict=True):
        rows = slice(None) if group.rows is None else group.rows
        keys = _read_pages(cache, own, of_all.dtype)[:, None]
        q = of_all[rows].view(*own.positions.shape, *of_all.shape[1:])
        sums, logs = attend_part(q, keys, keys, causal_bias(own, _FULL, q.shape[2], q.dtype), mla.scale)
        sees_keys = (group.positions >= ranks.rank)[..., None]
        attended[rows] = sums[..., : mla.latent_dim].flatten(0, 1)
        log_sums[rows] = logs.masked_fill(~sees_keys, -torch.inf).flatten(0, 1)
    return joined_parts(*exchanged_parts(attended, log_sums, ranks), is_tiled=is_tiled)


def is_direct_cheaper(mla: Mla, num_rows: int) -> bool:
    """Compares multiplications per key and head: the absorbed form's excess, and computing K and V."""
    beyond = 2 * mla.latent_dim - mla.nope_dim - mla.v_head_dim
    return num_rows * beyond > mla.latent_dim * (mla.nope_dim + mla.v_head_dim)


def _absorbed(
    q_nope: Tensor,  # [G, Q, heads, nope_dim]
    q_rope: Tensor,
    stored: Tensor,  # [G, S, latent_dim + rope_dim]
    k_factor: Tensor,
    v_factor: Tensor,
    group: QueryGroup,
    mla: Mla,
    *,
    is_tiled: bool,
) -> Tensor:  # [G, Q, heads, v_head_dim]
    """One key head, whose values are the keys; of their sum only the latent's part is read."""
    q = torch.cat((_by_heads("gqhd,hdr->gqhr", q_nope, k_factor, is_tiled), q_rope), -1)
    bias = causal_bias(group, _FULL, q.shape[2], q.dtype)
    keys = stored[:, None]
    attended = attend(q, keys, keys, bias, Scores(scale=mla.scale, is_tiled=is_tiled))[..., : mla.latent_dim]
    return _by_heads("gqhr,hdr->gqhd", attended, v_factor, is_tiled)


def _by_heads(equation: str, x: Tensor, factor: Tensor, is_tiled: bool) -> Tensor:
    """Tiled, in a call for each block of rows, or row."""
    if not is_tiled:
        return torch.einsum(equation, x, factor)
    return torch.cat([torch.einsum(equation, block, factor) for block in torch.split(x, 1)])


def _directly(
    q_nope: Tensor, q_rope: Tensor, stored: Tensor, k_factor: Tensor, v_factor: Tensor, group: QueryGroup, mla: Mla
) -> Tensor:
    """Heads of K and V; the shorter ones are zero-padded: the CPU's fast attention needs equal sizes."""
    latent, k_rope = stored.split_with_sizes((mla.latent_dim, mla.rope_dim), -1)
    keys = torch.einsum("gsr,hdr->ghsd", latent, k_factor)
    keys = torch.cat((keys, k_rope[:, None].expand(-1, keys.shape[1], -1, -1)), -1)
    values = torch.einsum("gsr,hdr->ghsd", latent, v_factor)
    q, size = torch.cat((q_nope, q_rope), -1), max(keys.shape[-1], mla.v_head_dim)
    q, keys, values = (F.pad(x, (0, size - x.shape[-1])) for x in (q, keys, values))
    bias = causal_bias(group, _FULL, 1, q.dtype)
    return attend(q, keys, values, bias, Scores(scale=mla.scale))[..., : mla.v_head_dim]


def _write_pages(cache: LatentCache[Tensor], plan: AttentionPlan, latents: Tensor, ranks: RankGroup) -> None:
    """Into pages [pages, page_size / num_parts, latent_dim + rope_dim]."""
    pages, scales, num_parts = cache.tensor, cache.spec.scales, cache.spec.num_parts
    page_size = pages.shape[1] * num_parts
    slots = plan.slots.k // (2 * page_size) * page_size + plan.slots.k % page_size  # slots of K, without V between
    if num_parts > 1:
        own = (slots % num_parts == ranks.rank).nonzero()[:, 0]
        slots, latents = slots[own] // num_parts, latents[own]
    if scales is not None:
        latents, pages = e4m3(latents.float() / scales.k).view(torch.uint8), pages.view(torch.uint8)
    pages.view(-1, pages.shape[2]).index_copy_(0, slots, latents)


def _read_pages(cache: LatentCache[Tensor], group: QueryGroup, dtype: torch.dtype) -> Tensor:
    """Latents of the group's requests, [G, S, latent_dim + rope_dim]; rows past a request's end are 0."""
    pages, scales = cache.tensor, cache.spec.scales
    num_requests, num_columns = len(group.page_ids), pages.shape[2]
    bits = pages if scales is None else pages.view(torch.uint8)
    rows = bits.index_select(0, group.page_ids.flatten()).view(-1, num_columns)
    if group.foreign_rows is not None:
        rows.index_fill_(0, group.foreign_rows, 0)
    rows = rows.view(num_requests, -1, num_columns)[:, : group.num_keys]
    return rows if scales is None else rows.view(torch.float8_e4m3fn).to(dtype) * scales.k
