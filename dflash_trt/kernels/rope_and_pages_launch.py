"""Launching the kernels that norm, rotate and store: checks, grids, and what is compiled ahead.

Nothing here reads a tensor's content, so a launch can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.launching import FLOATS, check, check_pages, check_tensor, next_power_of_2, request_capacity
from dflash_trt.kernels.rope_and_pages import draft_context_kernel, rotate_and_store_kernel

HEADS_PER_PROGRAM = 8
NUM_WARPS = 2
MAX_POSITIONS = 1 << 22  # beyond, the cosines of `cos_and_sin` lose accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """RoPE with `inv_freq` and `amplitude` from `network.rope.RopeFrequencies`; None means no rotation.

    `inv_freq` is float32 [D / 2], or shorter if only the first dimensions of a head are rotated, two per frequency.
    `q_norm` and `k_norm` F or float32 [D] are RMSNorm weights over each head, applied before the rotation; both or
    neither. `norms_v` also norms each head of v, without a weight.
    """

    inv_freq: Tensor | None
    amplitude: float = 1.0
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    norms_v: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLayers:
    """Stacked parameters of drafter layers: pages, k_norm F [layers, D], page scales float32 [layers]."""

    first_pages: Tensor  # [pages, 2, page_size, kv_heads, D]
    page_offsets: Tensor  # int64 [layers], in elements from first_pages
    k_norms: Tensor | None
    k_scales: Tensor
    v_scales: Tensor


def stack_draft_layers(
    pages: Sequence[Tensor], *, k_norms: Sequence[Tensor] | None, k_scales: Sequence[float], v_scales: Sequence[float]
) -> DraftLayers:
    """Made once per engine: page pools stay where they are."""
    first = pages[0]
    byte_offsets = [tensor.data_ptr() - first.data_ptr() for tensor in pages]
    check(
        all(offset % 64 == 0 for offset in byte_offsets) and len({tensor.shape for tensor in pages}) == 1,
        "draft pages",
        expected="pools of one shape, 64 bytes aligned to each other",
        found=[tuple(tensor.shape) for tensor in pages],
        hint="Allocate each pool on its own, or all in one tensor.",
    )
    is_scaled = any(scale != 1.0 for scale in (*k_scales, *v_scales))
    scales = (2.0, 2.0) if is_scaled else (1.0, 1.0)
    check_pages(first, dtype=first.dtype, head_dim=first.shape[4], scales=scales)
    offsets = [offset // first.element_size() for offset in byte_offsets]
    return DraftLayers(
        first_pages=first,
        page_offsets=torch.tensor(offsets, dtype=torch.int64, device=first.device),
        k_norms=None if k_norms is None else torch.stack(list(k_norms)),
        k_scales=torch.tensor(list(k_scales), dtype=torch.float32, device=first.device),
        v_scales=torch.tensor(list(v_scales), dtype=torch.float32, device=first.device),
    )


def rotate_and_store(
    q: Tensor | None,  # F [T, heads, D]; rows and heads may be further apart, as in slices of the projection's output
    k: Tensor,  # F [T, kv_heads, D], rows likewise
    v: Tensor,
    pages: Tensor,  # F or float8_e4m3fn [pages, 2, page_size, kv_heads, D], written
    requests: RequestTensors,  # context_lens are not read
    positions: Tensor,  # int32 [T]
    rotation: Rotation,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    limits: Tensor | None = None,  # int32 [R]: rows at positions >= limit leave the pages alone
) -> Tensor | None:
    """Norm and rotate q and k, norm v; return q, dense, and write k and v at their positions.

    Without q, the rotation's q_norm is not read.
    """
    rotation = rotation if q is not None else replace(rotation, q_norm=rotation.k_norm)
    _check_rows(q, k, v, positions, rotation)
    num_requests = len(requests.page_table)
    check_pages(pages, dtype=k.dtype, head_dim=k.shape[2], scales=(k_scale, v_scale))
    check(pages.shape[3] == k.shape[1], "k", expected=f"{pages.shape[3]} heads", found=k.shape[1], hint="As in pages.")
    requests.check(num_requests, "token_offsets", "page_table")
    if limits is not None:
        check_tensor("limits", limits, dtype=torch.int32, shape=[num_requests])
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    row_inputs = (k if q is None else q, k, v, k if q_out is None else q_out, k, pages)
    placement = (requests.token_offsets, requests.page_table, requests.token_offsets if limits is None else limits)
    num_heads = 0 if q is None else q.shape[1]
    _launch(row_inputs, positions, placement, rotation, (k_scale, v_scale), num_heads, kv_roles=2)
    return q_out


def rotate_queries(
    q: Tensor,  # F [T, heads, D]; rows may be further apart
    positions: Tensor,  # int32 [T]
    rotation: Rotation,  # its k_norm is not read
) -> Tensor:  # F [T, heads, D]
    """Norm and rotate q of a layer that reads pages which another has written."""
    rotation, stand_in = replace(rotation, k_norm=rotation.q_norm), q[:, :1]
    _check_rows(q, stand_in, stand_in, positions, rotation)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = (q, stand_in, stand_in, q_out, q_out, stand_in)
    _launch(rows, positions, None, rotation, (1.0, 1.0), q.shape[1], kv_roles=0)
    return q_out


def rotate_block(
    q: Tensor,  # F [N, heads, D]; rows may be further apart
    k: Tensor,  # F [N, kv_heads, D], likewise
    positions: Tensor,  # int32 [N]
    rotation: Rotation,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate q and k of the draft blocks, whose K/V go into no page. Both dense."""
    _check_rows(q, k, k, positions, rotation)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _launch((q, k, k, q_out, k_out, k), positions, None, rotation, (1.0, 1.0), q.shape[1], kv_roles=1)
    return q_out, k_out


def store_draft_context(
    kv: Tensor,  # F [T, layers * 2 * kv_heads * D]: k of layer 0, v of layer 0, k of layer 1, ...
    layers: DraftLayers,
    requests: RequestTensors,  # context_lens: the next context lengths
    positions: Tensor,  # int32 [T]
    rotation: Rotation,  # its norms are not read: see DraftLayers
) -> None:
    """Norm, rotate and write every layer's draft context, for rows at positions < next context length."""
    pages, num_requests, num_layers = layers.first_pages, len(requests.page_table), len(layers.page_offsets)
    kv_heads, head_dim = pages.shape[3:]
    check_tensor("kv", kv, dtype=FLOATS, shape=[len(positions), num_layers * 2 * kv_heads * head_dim])
    check_pages(pages, dtype=kv.dtype, head_dim=head_dim, scales=(1.0, 1.0))
    check_tensor("positions", positions, dtype=torch.int32, shape=[len(positions)])
    requests.check(num_requests, "context_lens", "token_offsets", "page_table")
    inv_freq = rotation.inv_freq
    assert inv_freq is not None, "drafters rotate their keys"
    check_tensor("inv_freq", inv_freq, dtype=torch.float32, shape=[head_dim // 2])
    if layers.k_norms is not None:
        check_tensor("k_norms", layers.k_norms, dtype=kv.dtype, shape=[num_layers, head_dim])
    if len(positions) == 0:
        return
    draft_context_kernel[(len(positions), num_layers, _head_blocks(kv_heads))](
        kv,
        pages,
        layers.page_offsets,
        kv if layers.k_norms is None else layers.k_norms,
        layers.k_scales,
        layers.v_scales,
        inv_freq,
        positions,
        requests.token_offsets,
        requests.page_table,
        requests.context_lens,
        rotation.amplitude,
        rotation.eps,
        kv_heads,
        num_requests,
        requests.page_table.shape[1],
        _page_shift(pages),
        **rotation_constants(head_dim, num_requests),
        HAS_NORM=layers.k_norms is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _page_shift(pages: Tensor) -> int:
    return int(pages.shape[2]).bit_length() - 1


def _check_rows(q: Tensor | None, k: Tensor, v: Tensor, positions: Tensor, rotation: Rotation) -> None:
    check_tensor("k", k, dtype=FLOATS, shape=[None, None, None], row_stride_is_free=True)
    num_rows, _, head_dim = k.shape
    check_tensor("v", v, dtype=k.dtype, shape=k.shape, row_stride_is_free=True)
    check_tensor("positions", positions, dtype=torch.int32, shape=[num_rows])
    if q is not None:
        if q.shape[1] == 1 or q.stride(1) == head_dim:
            check_tensor("q", q, dtype=k.dtype, shape=[num_rows, None, head_dim], row_stride_is_free=True)
        else:  # the heads are further apart
            check_tensor("q", q[:, 0], dtype=k.dtype, shape=[num_rows, head_dim], row_stride_is_free=True)
    if rotation.inv_freq is not None:
        check_tensor("inv_freq", rotation.inv_freq, dtype=torch.float32, shape=[None])
        num_pairs = len(rotation.inv_freq)
        check(
            num_pairs <= head_dim // 2, "inv_freq", expected=f"at most {head_dim // 2}", found=num_pairs, hint="As D."
        )
    for name, weight in (("q_norm", rotation.q_norm), ("k_norm", rotation.k_norm)):
        if weight is not None:
            check_tensor(name, weight, dtype=(k.dtype, torch.float32), shape=[head_dim])
    has_both = (rotation.q_norm is None) == (rotation.k_norm is None)
    check(has_both, "rotation", expected="both norms or neither", found="one", hint="No model norms only one.")


def _head_blocks(num_heads: int) -> int:
    return -(-num_heads // HEADS_PER_PROGRAM)


def rotation_constants(head_dim: int, num_requests: int) -> dict[str, int | bool]:
    return {
        "HEAD_DIM": head_dim,
        "HALF": next_power_of_2(head_dim // 2),
        "HEADS": HEADS_PER_PROGRAM,
        "REQUESTS": request_capacity(num_requests),
    }


def head_constants(head_dim: int, *, rotary_dim: int | None = None, q_pitch: int | None = None) -> dict[str, int]:
    """Head constants, also of the kernel that rotates queries.

    By default a whole head, and adjacent heads.
    """
    return {"ROTARY": rotary_dim or head_dim, "Q_PITCH": q_pitch or head_dim}


def _launch(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],  # q, k, v, q_out, k_out, pages
    positions: Tensor,
    placement: tuple[Tensor, Tensor, Tensor] | None,  # token_offsets, page_table, limits
    rotation: Rotation,
    scales: tuple[float, float],
    q_heads: int,
    *,
    kv_roles: int,  # 0: only q; 1: K, too; 2: and V
) -> None:
    q, k, v, _, _, pages = rows
    num_rows, kv_heads, head_dim = k.shape
    if num_rows == 0:
        return
    token_offsets, page_table, limits = placement or (positions, positions, positions)
    num_requests = 1 if placement is None else len(page_table)
    flags: dict[str, Any] = {
        "HAS_NORM": rotation.k_norm is not None,
        "HAS_ROPE": rotation.inv_freq is not None,
        "STORES_PAGES": placement is not None,
        "HAS_LIMITS": limits is not token_offsets and placement is not None,
        "POOLED": False,
        "NORMS_V": rotation.norms_v,
    }
    grid = (num_rows, _head_blocks(q_heads) + kv_roles * _head_blocks(kv_heads))
    rotate_and_store_kernel[grid](
        *rows,
        positions,  # not read: pages are given
        k if rotation.q_norm is None else rotation.q_norm,
        k if rotation.k_norm is None else rotation.k_norm,
        positions if rotation.inv_freq is None else rotation.inv_freq,
        positions,
        token_offsets,
        page_table,
        limits,
        rotation.amplitude,
        rotation.eps,
        *scales,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        q_heads,
        kv_heads,
        num_requests,
        1 if placement is None else page_table.shape[1],
        0 if placement is None else _page_shift(pages),
        0,
        **rotation_constants(head_dim, num_requests),
        **head_constants(
            head_dim,
            rotary_dim=None if rotation.inv_freq is None else 2 * len(rotation.inv_freq),
            q_pitch=q.stride(1) if q_heads else None,
        ),
        **flags,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
