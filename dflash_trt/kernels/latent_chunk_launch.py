"""Launching direct attention of prompts that begin in a step: when, and with which tiles.

Nothing here reads a tensor's content: which requests begin is decided on the device.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels import launch_rules
from dflash_trt.kernels.attention_launch import FLOATS
from dflash_trt.kernels.attention_plan import AttentionPlans, Partition, RequestTensors
from dflash_trt.kernels.capacity import next_power_of_2, request_capacity
from dflash_trt.kernels.latent_chunk import latent_chunk_kernel
from dflash_trt.kernels.launch_rules import ANY_DISTANCE, ANY_ROWS
from dflash_trt.kernels.loop_stages import active_architecture, fenced_stages
from dflash_trt.kernels.tensor_checks import check, check_tensor

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
    part = _partition(constants, num_rows=num_rows, num_requests=num_requests, min_rows=min_rows)
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


def _partition(constants: Mapping[str, int], *, num_rows: int, num_requests: int, min_rows: int) -> Partition:
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
