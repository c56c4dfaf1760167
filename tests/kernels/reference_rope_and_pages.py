"""What the kernels that norm, rotate and store compute, in plain PyTorch: one row at a time.

Each function takes the arguments of the launcher of the same name and defines its result. Arithmetic is in float32
and rounded once. Pages are updated in place.
"""

import torch
from torch import Tensor

from dflash_trt.kernels.attention_launch import RequestTensors
from dflash_trt.kernels.rope_and_pages_launch import Rotation

E4M3_MAX = 448.0


def rotate_and_store(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    requests: RequestTensors,
    positions: Tensor,
    rotation: Rotation,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    limits: Tensor | None = None,
) -> Tensor | None:
    """See `rope_and_pages_launch.rotate_and_store`."""
    rotated_k = rotate(k, positions, rotation.k_norm, rotation)
    values = v.float()
    if rotation.norms_v:
        values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + rotation.eps)
    store_rows(rotated_k / k_scale, values / v_scale, pages, requests, positions, limits)
    return None if q is None else rotate(q, positions, rotation.q_norm, rotation).to(q.dtype)


def rotate_queries(q: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """See `rope_and_pages_launch.rotate_queries`."""
    return rotate(q, positions, rotation.q_norm, rotation).to(q.dtype)


def rotate_block(q: Tensor, k: Tensor, positions: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """See `rope_and_pages_launch.rotate_block`."""
    rotated_q = rotate(q, positions, rotation.q_norm, rotation)
    return rotated_q.to(q.dtype), rotate(k, positions, rotation.k_norm, rotation).to(k.dtype)


def store_draft_context(
    kv: Tensor,
    pages: list[Tensor],
    requests: RequestTensors,
    positions: Tensor,
    rotation: Rotation,
    *,
    k_norms: list[Tensor] | None,
    k_scales: list[float],
    v_scales: list[float],
) -> None:
    """See `rope_and_pages_launch.store_draft_context`; the layers' pools and norms are given one by one."""
    per_layer = kv.view(len(kv), len(pages), 2, *pages[0].shape[3:])
    for layer, layer_pages in enumerate(pages):
        norm = None if k_norms is None else k_norms[layer]
        k = rotate(per_layer[:, layer, 0], positions, norm, rotation) / k_scales[layer]
        v = per_layer[:, layer, 1].float() / v_scales[layer]
        store_rows(k, v, layer_pages, requests, positions, requests.context_lens)


def rotate(x: Tensor, positions: Tensor, norm: Tensor | None, rotation: Rotation) -> Tensor:
    """float32 [N, heads, D]: RMSNorm of each head if there is a weight, then rotate-half if there are frequencies."""
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + rotation.eps) * norm.float()
    if rotation.inv_freq is None:
        return x
    x, kept = x.tensor_split((2 * len(rotation.inv_freq),), dim=-1)
    angles = (positions.float()[:, None] * rotation.inv_freq)[:, None]  # [N, 1, pairs]
    cos, sin = angles.cos() * rotation.amplitude, angles.sin() * rotation.amplitude
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, kept), dim=-1)


def store_rows(
    k: Tensor,  # float32 [T, kv_heads, D], divided by the scales already
    v: Tensor,
    pages: Tensor,
    requests: RequestTensors,
    positions: Tensor,
    limits: Tensor | None,
) -> None:
    """Rows behind the last request, and those at or after their request's limit, leave the pages alone."""
    page_size = pages.shape[2]
    offsets = requests.token_offsets.tolist()
    for request in range(len(offsets) - 1):
        for row in range(offsets[request], offsets[request + 1]):
            position = int(positions[row])
            if limits is not None and position >= int(limits[request]):
                continue
            page = int(requests.page_table[request, position // page_size])
            for half, values in enumerate((k, v)):
                pages[page, half, position % page_size] = _stored(values[row], pages.dtype)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else values.to(dtype)
