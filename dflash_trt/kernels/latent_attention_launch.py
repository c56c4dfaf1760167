"""Launching the kernels of latent attention: which tile, which grid, how much workspace.

Nothing here reads a tensor's content, so a launch can be captured in a CUDA graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels import launch_rules
from dflash_trt.kernels.attention_launch import num_multiprocessors, workspace_size
from dflash_trt.kernels.attention_plan import AttentionPlans, Partition, RequestTensors, with_fixed_splits
from dflash_trt.kernels.compiling import active_architecture, fenced_stages
from dflash_trt.kernels.context_parts_launch import WHOLE_CONTEXT, ContextPart, PartRows
from dflash_trt.kernels.latent_attention import latent_attention_kernel
from dflash_trt.kernels.latent_chunk import latent_chunk_kernel
from dflash_trt.kernels.latent_pages import store_latents_kernel
from dflash_trt.kernels.latent_rules import FLOAT32_TILE, FP8_TILE, TILE, LatentShape, num_work_slots
from dflash_trt.kernels.launch_rules import ANY_DISTANCE, ANY_ROWS, heads_reciprocal
from dflash_trt.kernels.launching import FLOATS, check, check_tensor, next_power_of_2, request_capacity
from dflash_trt.kernels.rope_and_pages_launch import HEADS_PER_PROGRAM, NUM_WARPS

ATTENTION_WARPS: Final = 8  # 128 registers of each thread have the sums of 64 rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentRotation:
    """RoPE of keys and queries, defined by `network.rope.RopeFrequencies`, and the norm of latents."""

    inv_freq: Tensor  # float32 [rope_dim / 2]
    amplitude: float
    is_paired: bool  # RoPE turns neighbours
    norm: Tensor  # F [latent_dim]
    eps: float


def store_latents(
    q_rope: Tensor,  # F [N, heads, rope_dim]; rows and heads may be further apart
    latents: Tensor,  # F [N, latent_dim], before their norm; rows may be further apart
    k_rope: Tensor,  # F [N, rope_dim], likewise
    queries: Tensor,  # F [N, heads, latent_dim + rope_dim]: the last rope_dim of each head are written
    pages: Tensor,  # F or float8_e4m3fn [pages, page_size / ranks, latent_dim + rope_dim], written
    requests: RequestTensors,  # context_lens are not read
    positions: Tensor,  # int32 [N]
    rotation: LatentRotation,
    *,
    k_scale: float = 1.0,
    rows: Tensor | None = None,  # out, F [N, latent_dim + rope_dim]: what the pages hold of these rows
    part: ContextPart = WHOLE_CONTEXT,
) -> None:
    """Norm the latents and rotate the keys into their pages, and rotate the queries."""
    num_rows, num_heads, rope_dim = q_rope.shape
    latent_dim, num_requests = latents.shape[1], len(requests.page_table)
    check_tensor("latents", latents, dtype=FLOATS, shape=[num_rows, latent_dim], row_stride_is_free=True)
    check_tensor("k_rope", k_rope, dtype=latents.dtype, shape=[num_rows, rope_dim], row_stride_is_free=True)
    _check_queries(q_rope, queries, latents)
    _check_pages(pages, latents.dtype, latent_dim + rope_dim, k_scale)
    check_tensor("positions", positions, dtype=torch.int32, shape=[num_rows])
    check_tensor("inv_freq", rotation.inv_freq, dtype=torch.float32, shape=[rope_dim // 2])
    check_tensor("norm", rotation.norm, dtype=latents.dtype, shape=[latent_dim])
    requests.check(num_requests, "token_offsets", "page_table")
    if rows is not None:
        check_tensor("rows", rows, dtype=latents.dtype, shape=[num_rows, latent_dim + rope_dim])
    shape = LatentShape(num_heads=num_heads, latent_dim=latent_dim, rope_dim=rope_dim)
    store_latents_kernel[(num_rows, 1 + -(-num_heads // HEADS_PER_PROGRAM))](
        q_rope,
        latents,
        k_rope,
        queries,
        pages,
        queries if rows is None else rows,
        rotation.norm,
        rotation.inv_freq,
        positions,
        requests.token_offsets,
        requests.page_table,
        rotation.amplitude,
        rotation.eps,
        k_scale,
        latents.stride(0),
        k_rope.stride(0),
        q_rope.stride(0),
        q_rope.stride(1),
        num_heads,
        num_requests,
        requests.page_table.shape[1],
        _page_shift(pages) + part.shift,
        part.rank,
        part.shift,
        **store_constants(shape, num_requests),
        STORES_ROWS=rows is not None,
        IS_PAIRED=rotation.is_paired,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )


def _check_queries(q_rope: Tensor, queries: Tensor, latents: Tensor) -> None:
    (num_rows, num_heads, rope_dim), dtype = q_rope.shape, latents.dtype
    check(q_rope.dtype == dtype, "q_rope", expected=str(dtype), found=q_rope.dtype, hint="As latents.")
    check(q_rope.stride(2) == 1, "q_rope", expected="dense heads", found=q_rope.stride(), hint="Call .contiguous().")
    check_tensor("queries", queries, dtype=dtype, shape=[num_rows, num_heads, latents.shape[1] + rope_dim])


def latent_tile(dtype: torch.dtype, page_dtype: torch.dtype) -> int:
    """Rows of a tile: query rows times query heads."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    return FP8_TILE if page_dtype == torch.float8_e4m3fn else TILE


def latent_key_block(*, dtype: torch.dtype, page_size: int) -> int:
    """Keys of a block lie in one page, unless pages are smaller than what the tensor cores take."""
    return launch_rules.latent_key_block(page_size=page_size, is_float32=int(dtype == torch.float32))


def latent_constants(shape: LatentShape) -> dict[str, int]:
    """Constants of every kernel that knows latents."""
    latent_dim = max(16, next_power_of_2(shape.latent_dim))
    return {"LATENT": shape.latent_dim, "ROPE": shape.rope_dim, "LATENT_DIM": latent_dim}


def attention_stages(dtype: torch.dtype) -> int:
    """Stages of the pipeline that copies latents: shared memory holds three of 36 KiB and the queries."""
    return 2 if dtype == torch.float32 else 3


def store_constants(shape: LatentShape, num_requests: int) -> dict[str, int]:
    return latent_constants(shape) | {
        "HALF": next_power_of_2(shape.rope_dim // 2),
        "HEADS": HEADS_PER_PROGRAM,
        "REQUESTS": request_capacity(num_requests),
    }


def attention_constants(shape: LatentShape, *, tile: int, dtype: torch.dtype, page_size: int) -> dict[str, int | bool]:
    keys = latent_key_block(dtype=dtype, page_size=page_size)
    return latent_constants(shape) | {
        "ROPE_DIM": max(16, next_power_of_2(shape.rope_dim)),
        "TILE": tile,
        "KEY_BLOCK": keys,
        "IS_IN_ONE_PAGE": page_size % keys == 0,
    }


def attend_latents(
    queries: Tensor,  # F [N, heads, latent_dim + rope_dim] absorbed and rotated: see `LatentShape.query_elements`
    pages: Tensor,  # F or float8_e4m3fn [pages, page_size, latent_dim + rope_dim]; the step's rows are in them already
    requests: RequestTensors,  # context_lens: tokens before this step
    *,
    latent_dim: int,
    score_scale: float,
    k_scale: float = 1.0,
    workspace: Tensor,  # float32, see `largest_workspace`
    plans: AttentionPlans,
    attended: Tensor,  # out, F [N, heads, latent_dim]
    min_direct_rows: int | None = None,  # rows of prompts that begin in this step and have as many become 0
    split_length: int | None = None,  # as in `AttentionOptions`
    log_sums: Tensor | None = None,  # out, float32 [N, heads], for `PartRows.by_rank`
) -> PartRows:
    """Causal attention of a step's tokens over latents, before the value's factor, all but joining the splits.

    Verify blocks and chunks of prompts are one launch: their tiles are of one size. The caller joins the splits with
    `PartRows.join`, or with `by_rank` of one rank's part of the positions, for all heads (see `own_rows`).
    """
    _, num_heads, row_size = queries.shape
    shape = LatentShape(num_heads=num_heads, latent_dim=latent_dim, rope_dim=row_size - latent_dim)
    _check_attended(queries, pages, requests, shape, attended, k_scale)
    tile, page_size = latent_tile(queries.dtype, pages.dtype), pages.shape[1]
    group_heads, part = _partition(shape, tile, queries, requests, page_size, split_length)
    groups, reciprocal = num_heads // group_heads, heads_reciprocal(heads_per_kv=group_heads)
    plan = plans.of(requests, part)
    size = workspace_size(tile=tile, kv_heads=groups, head_dim=latent_dim, num_slots=part.num_slots)
    partials, stats = size.parts_of(workspace, hint="Make it as large as largest_workspace says.")
    latent_attention_kernel[(groups, part.num_items)](
        queries,
        pages,
        requests.page_table,  # not read: pages are given
        attended,
        partials,
        stats,
        stats if log_sums is None else log_sums,
        plan,
        requests.token_offsets,
        requests.context_lens,
        requests.page_table,
        score_scale,
        k_scale,
        ANY_ROWS if min_direct_rows is None else min_direct_rows,
        requests.page_table.shape[1],
        groups,
        group_heads,
        reciprocal,
        _page_shift(pages),
        0,
        **attention_constants(shape, tile=tile, dtype=queries.dtype, page_size=page_size),
        POOLED=False,
        HAS_LOG_SUMS=log_sums is not None,
        num_warps=ATTENTION_WARPS,
        num_stages=fenced_stages(attention_stages(queries.dtype), active_architecture()),
        enable_fp_fusion=True,
    )
    heads = (groups, group_heads)
    return PartRows(requests, attended, stats if log_sums is None else log_sums, partials, stats, plan, part, heads)


def _partition(
    shape: LatentShape, tile: int, queries: Tensor, requests: RequestTensors, page_size: int, split_length: int | None
) -> tuple[int, Partition]:
    """The heads of a tile, and the plan's key."""
    group_heads, num_requests = shape.group_heads(tile), len(requests.context_lens)
    groups = shape.num_heads // group_heads
    part = Partition(
        num_rows=len(queries),
        num_requests=num_requests,
        request_capacity=request_capacity(num_requests),
        has_block=False,
        tile=tile,
        heads_per_kv=group_heads if groups == 1 else tile,  # a tile has all heads of its rows, or some of one row
        key_block=latent_key_block(dtype=queries.dtype, page_size=page_size),
        max_lag=ANY_DISTANCE,
        window_step=1,
        num_slots=num_work_slots(groups, num_multiprocessors(queries.device)),
    )
    if split_length is not None:
        part = with_fixed_splits(part, split_length, num_keys=requests.page_table.shape[1] * page_size)
    return group_heads, part


def _check_attended(
    queries: Tensor, pages: Tensor, requests: RequestTensors, shape: LatentShape, attended: Tensor, k_scale: float
) -> None:
    num_rows, num_requests = len(queries), len(requests.context_lens)
    check(num_requests > 0, "requests", expected="at least one", found=0, hint="Launch nothing for an empty step.")
    check_tensor("queries", queries, dtype=FLOATS, shape=[None, None, None])
    stored = queries.untyped_storage().nbytes() // queries.itemsize - queries.storage_offset()
    read, hint = shape.query_elements(num_rows), "Allocate that many elements."
    check(stored >= read, "queries", expected=f"memory for {read} elements", found=stored, hint=hint)
    _check_pages(pages, queries.dtype, shape.row_size, k_scale)
    check_tensor("attended", attended, dtype=queries.dtype, shape=[num_rows, shape.num_heads, shape.latent_dim])
    requests.check(num_requests, "token_offsets", "context_lens", "page_table")


def _check_pages(pages: Tensor, dtype: torch.dtype, row_size: int, k_scale: float) -> None:
    check_tensor("pages", pages, dtype=(dtype, torch.float8_e4m3fn), shape=[None, None, row_size])
    page_size, hint = pages.shape[1], "Build with 16, 32 or 64."
    check(page_size & (page_size - 1) == 0, "page_size", expected="a power of two", found=page_size, hint=hint)
    is_scaled = pages.dtype == torch.float8_e4m3fn
    hint = "Scales belong to FP8 pages."
    check(is_scaled or k_scale == 1.0, "k_scale", expected="1.0 for pages that are not FP8", found=k_scale, hint=hint)


def _page_shift(pages: Tensor) -> int:
    return int(pages.shape[1]).bit_length() - 1


CHUNK_TILE: Final = 128
FLOAT32_CHUNK_TILE: Final = 32
CHUNK_KEY_BLOCK: Final = 64
WIDE_CHUNK_KEY_BLOCK: Final = 32  # for heads of more than 128, where 64 keys spill registers
FLOAT32_CHUNK_KEY_BLOCK: Final = 16
CHUNK_WARPS: Final = 8
KV_COLUMNS: Final = 128
FLOAT32_KV_COLUMNS: Final = 32
KV_LATENT_BLOCK: Final = 64
FLOAT32_KV_LATENT_BLOCK: Final = 32
KV_WARPS: Final = 8


def min_direct_rows(*, num_rows: int, num_requests: int, num_verify_rows: int) -> int | None:
    """Rows from which a starting prompt is attended directly; None if no request can have as many."""
    least = launch_rules.min_direct_rows(num_rows=num_rows, num_requests=num_requests, num_verify_rows=num_verify_rows)
    return None if least == ANY_ROWS else least


def chunk_tile(dtype: torch.dtype) -> int:
    return FLOAT32_CHUNK_TILE if dtype == torch.float32 else CHUNK_TILE


def chunk_constants(
    *, nope_dim: int, value_dim: int, latent_dim: int, rope_dim: int, dtype: torch.dtype
) -> dict[str, int]:
    def padded(size: int) -> int:
        return max(16, next_power_of_2(size))

    key_block = CHUNK_KEY_BLOCK if max(nope_dim, value_dim) <= 128 else WIDE_CHUNK_KEY_BLOCK
    return {
        "NOPE": nope_dim,
        "VALUE": value_dim,
        "LATENT": latent_dim,
        "ROPE": rope_dim,
        "NOPE_DIM": padded(nope_dim),
        "VALUE_DIM": padded(value_dim),
        "ROPE_DIM": padded(rope_dim),
        "TILE": chunk_tile(dtype),
        "KEY_BLOCK": FLOAT32_CHUNK_KEY_BLOCK if dtype == torch.float32 else key_block,
    }


def chunk_stages(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.float32 else 2


def kv_constants(
    *, nope_dim: int, value_dim: int, latent_dim: int, rope_dim: int, dtype: torch.dtype
) -> dict[str, int]:
    """Constants of a plugin's GEMM, whose row tiles match the following attention's."""
    is_float32 = dtype == torch.float32
    return {
        "NOPE": nope_dim,
        "VALUE": value_dim,
        "LATENT": latent_dim,
        "ROPE": rope_dim,
        "TILE": chunk_tile(dtype),
        "COLUMNS": FLOAT32_KV_COLUMNS if is_float32 else KV_COLUMNS,
        "LATENT_BLOCK": FLOAT32_KV_LATENT_BLOCK if is_float32 else KV_LATENT_BLOCK,
    }


def kv_stages(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.float32 else 3


def attend_chunks(
    q_nope: Tensor,  # F [N, heads, nope_dim]; rows and heads may be further apart
    queries: Tensor,  # F [N, heads, latent_dim + rope_dim], rotated after the first latent_dim of each head
    kv: Tensor,  # F [N, heads, nope_dim + value_dim]
    rows: Tensor,  # F [N, latent_dim + rope_dim], with rotated keys
    requests: RequestTensors,  # context_lens: tokens before this step
    *,
    latent_dim: int,
    score_scale: float,
    min_rows: int,  # per prompt, see `min_direct_rows`
    plans: AttentionPlans,
    attended: Tensor,  # out, F [N, heads, value_dim]
) -> None:
    """Attend with every row of the prompts that begin in this step, and leave other requests' rows alone."""
    num_rows, num_heads, nope_dim = q_nope.shape
    row_size, value_dim, num_requests = rows.shape[1], attended.shape[2], len(requests.context_lens)
    check(q_nope.stride(2) == 1, "q_nope", expected="dense heads", found=q_nope.stride(), hint="Call .contiguous().")
    check_tensor("queries", queries, dtype=FLOATS, shape=[num_rows, num_heads, row_size])
    check_tensor("kv", kv, dtype=queries.dtype, shape=[num_rows, num_heads, nope_dim + value_dim])
    check_tensor("rows", rows, dtype=queries.dtype, shape=[num_rows, row_size])
    check_tensor("attended", attended, dtype=queries.dtype, shape=[num_rows, num_heads, value_dim])
    constants = chunk_constants(
        nope_dim=nope_dim,
        value_dim=value_dim,
        latent_dim=latent_dim,
        rope_dim=row_size - latent_dim,
        dtype=queries.dtype,
    )
    part = _chunk_partition(constants, num_rows=num_rows, num_requests=num_requests, min_rows=min_rows)
    latent_chunk_kernel[(num_heads, part.num_items)](
        q_nope,
        queries,
        kv,
        rows,
        attended,
        requests.page_table,  # not read: there is a state
        plans.of(requests, part),
        requests.token_offsets,
        requests.context_lens,
        score_scale,
        min_rows,
        q_nope.stride(0),
        q_nope.stride(1),
        num_heads,
        0,
        **constants,
        POOLED=False,
        num_warps=CHUNK_WARPS,
        num_stages=fenced_stages(chunk_stages(queries.dtype), active_architecture()),
        enable_fp_fusion=True,
    )


def _chunk_partition(constants: Mapping[str, int], *, num_rows: int, num_requests: int, min_rows: int) -> Partition:
    return Partition(
        num_rows=num_rows,
        num_requests=num_requests,
        request_capacity=request_capacity(num_requests),
        has_block=False,
        tile=constants["TILE"],
        heads_per_kv=1,
        key_block=constants["KEY_BLOCK"],
        max_lag=ANY_DISTANCE,
        window_step=1,
        num_slots=1,  # no splits: there are tiles enough
        min_rows=min_rows,
    )
