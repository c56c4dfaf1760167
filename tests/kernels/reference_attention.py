"""What the attention and page kernels compute, in plain PyTorch: one request at a time, no tiles, no splits.

Each function takes the arguments of the launcher of the same name and defines its result. Sums are in float32.
"""

import torch
from torch import Tensor

from dflash_trt.kernels.attention_launch import AttentionOptions, RequestTensors


def attend_pages(q: Tensor, pages: Tensor, requests: RequestTensors, options: AttentionOptions) -> Tensor:
    """See `attention_launch.attend_pages`."""
    attended = torch.zeros_like(q)
    offsets, contexts = requests.token_offsets.tolist(), requests.context_lens.tolist()
    for request, context in enumerate(contexts):
        rows = slice(offsets[request], offsets[request + 1])
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            continue
        k, v = stored_rows(pages, requests.page_table[request], context + num_rows, options)
        positions = torch.arange(context, context + num_rows)
        key_positions = torch.arange(context + num_rows)
        attended[rows] = attend_rows(q[rows], k, v, positions, key_positions, options)
    return attended


def attend_draft(
    q: Tensor, block: tuple[Tensor, Tensor], pages: Tensor, requests: RequestTensors, options: AttentionOptions
) -> Tensor:
    """See `attention_launch.attend_draft`."""
    attended = torch.empty_like(q)
    contexts = requests.context_lens.tolist()
    width = len(q) // len(contexts)
    for request, context in enumerate(contexts):
        rows = slice(request * width, (request + 1) * width)
        stored_k, stored_v = stored_rows(pages, requests.page_table[request], context, options)
        k = torch.cat((stored_k, block[0][rows].float()))
        v = torch.cat((stored_v, block[1][rows].float()))
        own = torch.arange(context, context + width)
        key_positions = torch.cat((torch.arange(context), own))
        if options.window is not None and options.is_window_anchored:
            is_seen = key_positions >= context - options.window
            k, v, key_positions = k[is_seen], v[is_seen], key_positions[is_seen]
        attended[rows] = attend_rows(q[rows], k, v, own, key_positions, options)
    return attended


def stored_rows(
    pages: Tensor, page_ids: Tensor, num_positions: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """K and V of the positions 0 .. num_positions - 1 of one request, float32 [num_positions, kv_heads, D]."""
    page_size = pages.shape[2]
    positions = torch.arange(num_positions, device=pages.device)
    page = page_ids.long()[positions // page_size]
    k, v = (pages[page, half, positions % page_size].float() for half in (0, 1))
    return k * options.k_scale, v * options.v_scale


def attend_rows(
    q: Tensor,  # F [rows, heads, D]
    k: Tensor,  # float32 [keys, kv_heads, D]
    v: Tensor,
    positions: Tensor,  # [rows]
    key_positions: Tensor,  # [keys]
    options: AttentionOptions,
) -> Tensor:
    """F [rows, heads, D]: softmax over the visible keys, and over the head's sink if there is one."""
    heads_per_kv = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(heads_per_kv, dim=1) for x in (k, v))
    scale = q.shape[2] ** -0.5 if options.score_scale is None else options.score_scale
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    lag = (positions[:, None] - key_positions[None, :]).to(q.device)
    visible = torch.ones_like(lag, dtype=torch.bool) if not options.is_causal else lag >= 0
    if options.window is not None and not options.is_window_anchored:
        visible &= lag.abs() < options.window
    if options.chunk is not None:
        visible &= positions[:, None] // options.chunk == key_positions[None, :] // options.chunk
    scores = scores.masked_fill(~visible, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, sinks), dim=2)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    weights = scores.softmax(dim=2)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
