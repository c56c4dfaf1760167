"""Latent attention of a step over the GPU kernels: direct for prompts that begin in it, else absorbed.

Absorbed, one GEMM of all heads applies the key's factor to the queries, and another the value's factor to the sums. In
between all heads attend over the latents themselves. Direct, one GEMM makes K and V of every head.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.backends.cuda.handles import Heads, Norm, tensor_of
from dflash_trt.backends.torch.process_group import RankGroup
from dflash_trt.core.model.mla import Mla
from dflash_trt.core.quantization import LayerKvScales
from dflash_trt.kernels.attention_fixed import Piece
from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.kernels.context_parts_launch import WHOLE_CONTEXT, ContextPart, join_parts, own_rows
from dflash_trt.kernels.head_product_launch import head_product
from dflash_trt.kernels.latent_attention_launch import (
    LatentRotation,
    attend_chunks,
    attend_latents,
    min_direct_rows,
    store_latents,
)
from dflash_trt.kernels.latent_rules import LatentShape
from dflash_trt.kernels.launch_rules import CONTEXT_PIECE_ROWS
from dflash_trt.network.ops import Rows
from dflash_trt.network.state import LatentCache


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentMemory:
    """Memory that an engine's layers use in turn; kept so that its rows always hold finite numbers."""

    queries: Tensor  # flat
    attended: Tensor
    part: ContextPart = WHOLE_CONTEXT

    @classmethod
    def allocate(
        cls,
        mlas: Collection[Mla],
        *,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        part: ContextPart = WHOLE_CONTEXT,
    ) -> "LatentMemory | None":
        """`mlas` have the heads that attend here: a rank's, or all over its part. None if no layer has latents."""
        if not mlas:
            return None
        num_rows = num_rows if part.num_ranks == 1 else min(num_rows, CONTEXT_PIECE_ROWS)
        shapes = [shape_of(mla) for mla in mlas]
        num_queries = max(shape.query_elements(num_rows) for shape in shapes)
        num_attended = max(shape.attended_elements(num_rows) for shape in shapes)
        return cls(
            queries=torch.zeros(num_queries, dtype=dtype, device=device),
            attended=torch.zeros(num_attended, dtype=dtype, device=device),
            part=part,
        )

    def views(self, num_rows: int, shape: LatentShape) -> tuple[Tensor, Tensor]:
        """F [num_rows, heads, row_size] and [num_rows, heads, latent_dim]."""
        heads = (num_rows, shape.num_heads)
        num_queries = num_rows * shape.num_heads * shape.row_size
        attended = self.attended[: shape.attended_elements(num_rows)]
        return self.queries[:num_queries].view(*heads, -1), attended.view(*heads, -1)


def shape_of(mla: Mla) -> LatentShape:
    """Shape of one rank's shard."""
    return LatentShape(num_heads=mla.num_heads, latent_dim=mla.latent_dim, rope_dim=mla.rope_dim)


def attend_device_latent(
    queries: tuple[Heads, Heads],  # q_nope, q_rope
    stored: tuple[Norm, Heads],  # latents, k_rope
    kv_b: Tensor,
    rows: Rows[Any],
    cache: LatentCache[Tensor],
    mla: Mla,
    memory: LatentMemory | None,
    workspace: Tensor,
    ranks: RankGroup,
    *,
    num_verify_rows: int,
) -> Tensor:
    """See `Ops.attend_latent`. Norm and rotations are done where their results are stored."""
    assert memory is not None
    (piece,) = rows.index[0].pieces
    q_nope, part = queries[0].x, memory.part
    num_rows, num_heads, _ = q_nope.shape
    k_factor, v_factor = _factors(kv_b, mla)
    if part.num_ranks == 1:
        absorbed, attended = memory.views(num_rows, shape_of(mla))
    else:
        absorbed = q_nope.new_empty(num_rows, num_heads, mla.latent_dim + mla.rope_dim)
    torch.bmm(q_nope.transpose(0, 1), k_factor, out=absorbed[..., : mla.latent_dim].transpose(0, 1))
    least = min_direct_rows(num_rows=num_rows, num_requests=len(rows.context_lens), num_verify_rows=num_verify_rows)
    own = None if least is None else absorbed.new_empty(num_rows, absorbed.shape[2])
    k_scale = (cache.spec.scales or LayerKvScales()).k
    _store(queries[1], stored, absorbed, own, rows, cache.tensor, k_scale, part)
    options: dict[str, Any] = {"latent_dim": mla.latent_dim, "score_scale": mla.scale, "k_scale": k_scale}
    if part.num_ranks == 1:
        options |= {"plans": piece.plans, "attended": attended, "min_direct_rows": least}
        attend_latents(absorbed, cache.tensor, piece.requests, workspace=workspace, **options).join()
    else:
        attended = _over_all_ranks(absorbed, cache, rows, mla, memory, workspace, ranks, options)
    values = absorbed.new_empty(num_rows, num_heads, mla.v_head_dim)
    torch.bmm(attended.transpose(0, 1), v_factor.transpose(1, 2), out=values.transpose(0, 1))
    if own is not None and least is not None:
        kv = torch.mm(own[:, : mla.latent_dim], kv_b.t()).view(num_rows, num_heads, -1)
        sizes: dict[str, Any] = {"latent_dim": mla.latent_dim, "score_scale": mla.scale, "min_rows": least}
        attend_chunks(q_nope, absorbed, kv, own, piece.requests, plans=piece.plans, attended=values, **sizes)
    return values.flatten(1)


def _over_all_ranks(
    absorbed: Tensor,  # F [N, heads, latent_dim + rope_dim], of this rank's heads
    cache: LatentCache[Tensor],
    rows: Rows[Any],
    mla: Mla,
    memory: LatentMemory,
    workspace: Tensor,
    ranks: RankGroup,
    options: dict[str, Any],
) -> Tensor:  # F [N, heads, latent_dim]
    """See `kernels.context_parts`."""
    num_rows, num_heads, _ = absorbed.shape
    num_ranks = ranks.num_ranks
    assert num_ranks == memory.part.num_ranks == cache.spec.num_parts
    shape = replace(shape_of(mla), num_heads=num_heads * num_ranks)
    joined = absorbed.new_empty(num_rows, num_heads, mla.latent_dim)
    for piece in rows.index[0].own_pieces:
        own = absorbed[piece.rows]
        counts = [len(own)] * num_ranks
        queries, attended = memory.views(len(own), shape)
        by_rank = queries.view(len(own), num_ranks, -1).transpose(0, 1)
        by_rank.copy_(ranks.all_gather_rows(own.flatten(1), counts).view(by_rank.shape))
        log_sums = torch.empty(attended.shape[:2], dtype=torch.float32, device=attended.device)
        options |= {"plans": piece.plans, "attended": attended, "log_sums": log_sums}
        part = attend_latents(queries, cache.tensor, piece.requests, workspace=workspace, **options)
        sent = part.by_rank(num_ranks)
        received = ranks.all_to_all_by_counts(sent.view(num_ranks * len(own), -1), counts, counts)
        join_parts(received.view(sent.shape), piece.requests.token_offsets, joined[piece.rows])
    return joined


def own_pieces(
    requests: RequestTensors,
    positions: Tensor,  # int32 [N]
    part: ContextPart,
    *,
    num_verify_rows: int,
) -> Iterator[Piece]:
    """All rows of a step as requests over this rank's positions, at most CONTEXT_PIECE_ROWS together."""
    num_rows, num_requests = len(positions), len(requests.context_lens)
    least = min_direct_rows(num_rows=num_rows, num_requests=num_requests, num_verify_rows=num_verify_rows)
    for first in range(0, num_rows, CONTEXT_PIECE_ROWS):
        rows = slice(first, min(first + CONTEXT_PIECE_ROWS, num_rows))
        yield Piece(rows=rows, requests=own_rows(requests, positions, part, rows=rows, min_direct_rows=least))


def attend_latent_in_splits(
    queries: tuple[Heads, Heads],
    stored: tuple[Norm, Heads],
    kv_b: Tensor,
    rows: Rows[Any],
    cache: LatentCache[Tensor],
    mla: Mla,
    memory: LatentMemory | None,
    workspace: Tensor,
    *,
    split_length: int,
) -> Tensor:
    """As `attend_device_latent`, absorbed for all rows: a row's bits depend on its own position and keys alone."""
    assert memory is not None
    q_nope = queries[0].x.contiguous()
    num_rows, num_heads, _ = q_nope.shape
    k_factor, v_factor = _factors(kv_b, mla)
    absorbed, attended = memory.views(num_rows, shape_of(mla))
    head_product(q_nope, k_factor, absorbed[..., : mla.latent_dim])
    k_scale = (cache.spec.scales or LayerKvScales()).k
    _store(queries[1], stored, absorbed, None, rows, cache.tensor, k_scale)
    for piece in rows.index[0].pieces:
        attend_latents(
            absorbed[piece.rows],
            cache.tensor,
            piece.requests,
            latent_dim=mla.latent_dim,
            score_scale=mla.scale,
            k_scale=k_scale,
            workspace=workspace,
            plans=piece.plans,
            attended=attended[piece.rows],
            split_length=split_length,
        ).join()
    values = absorbed.new_empty(num_rows, num_heads, mla.v_head_dim)
    head_product(attended, v_factor, values, is_transposed=True)
    return values.flatten(1)


def _factors(kv_b: Tensor, mla: Mla) -> tuple[Tensor, Tensor]:
    """Of keys [heads, nope_dim, latent_dim], and of values [heads, v_head_dim, latent_dim]."""
    by_heads = kv_b.view(mla.num_heads, -1, mla.latent_dim)
    k_factor, v_factor = by_heads.split_with_sizes((mla.nope_dim, mla.v_head_dim), 1)
    return k_factor, v_factor


def _store(
    q_rope: Heads,
    stored: tuple[Norm, Heads],
    queries: Tensor,
    own: Tensor | None,  # out: what the pages hold of these rows
    rows: Rows[Any],
    pages: Tensor,
    k_scale: float,
    part: ContextPart = WHOLE_CONTEXT,
) -> None:
    latents, k_rope = stored
    rope = k_rope.rope
    assert rope is not None and q_rope.rope is rope and q_rope.is_paired == k_rope.is_paired
    store_latents(
        q_rope.x,
        tensor_of(latents.source),
        k_rope.x.flatten(1),
        queries,
        pages,
        rows.index[0].requests,
        rows.positions,
        LatentRotation(
            inv_freq=rope.inv_freq,
            amplitude=rope.amplitude,
            is_paired=k_rope.is_paired,
            norm=latents.weight,
            eps=latents.eps,
        ),
        k_scale=k_scale,
        rows=own,
        part=part,
    )
