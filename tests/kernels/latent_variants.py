"""The kernels of latent attention as they are launched: to be compiled ahead and looked at."""

import torch

from dflash_trt.kernels import latent_attention_launch as launch
from dflash_trt.kernels.attention_launch import REDUCTION_ROWS, REDUCTION_STAGES
from dflash_trt.kernels.attention_reduction import attention_reduction_kernel
from dflash_trt.kernels.capacity import request_capacity
from dflash_trt.kernels.latent_attention import latent_attention_kernel
from dflash_trt.kernels.latent_chunk import latent_chunk_kernel
from dflash_trt.kernels.latent_chunk_launch import CHUNK_WARPS, chunk_constants, chunk_stages
from dflash_trt.kernels.latent_pages import store_latents_kernel
from dflash_trt.kernels.latent_rules import LatentShape
from dflash_trt.kernels.rope_and_pages_launch import HEADS_PER_PROGRAM, NUM_WARPS
from plugins.aot.variant import KernelVariant, pointer

FLOAT32_ARGUMENTS = ("partials", "partial_stats", "inv_freq", "sinks")
INT32_ARGUMENTS = ("plan", "positions", "token_offsets", "context_lens", "page_table")
STRIDES = ("latent_stride", "k_stride", "q_stride", "q_pitch")
FP32_ARGUMENTS = ("score_scale", "k_scale", "amplitude", "eps")


def latent_variants(
    shape: LatentShape,
    dtype: torch.dtype,
    *,
    page_dtype: torch.dtype,
    page_size: int = 32,
    num_requests: int = 64,
    nope_dim: int = 128,
    value_dim: int = 128,
) -> tuple[KernelVariant, ...]:
    """In the order of their launches. Grids use num_requests, num_rows, num_items, tile_capacity and groups."""
    tile = launch.latent_tile(dtype, page_dtype)
    attention = launch.attention_constants(shape, tile=tile, dtype=dtype, page_size=page_size)
    latent_dim = attention["LATENT_DIM"]
    reduction = {"HEAD_DIM": shape.latent_dim, "DIM": latent_dim, "TILE": tile, "KEY_BLOCK": attention["KEY_BLOCK"]}
    reduction |= {"REQUESTS": request_capacity(num_requests), "HAS_BLOCK": False, "PLANNED": True}
    head_blocks = -(-shape.num_heads // HEADS_PER_PROGRAM)
    chunk = chunk_constants(
        nope_dim=nope_dim, value_dim=value_dim, latent_dim=shape.latent_dim, rope_dim=shape.rope_dim, dtype=dtype
    )
    return (
        _variant(
            store_latents_kernel,
            dtype,
            page_dtype,
            constexprs=launch.store_constants(shape, num_requests) | {"IS_PAIRED": True, "STORES_ROWS": True},
            warps=(NUM_WARPS, 1),
            grid=("num_rows", str(1 + head_blocks), "1"),
        ),
        _variant(
            latent_attention_kernel,
            dtype,
            page_dtype,
            constexprs=attention,
            warps=(launch.ATTENTION_WARPS, launch.attention_stages(dtype)),
            grid=("groups", "num_items", "1"),
        ),
        _variant(
            attention_reduction_kernel,
            dtype,
            page_dtype,
            constexprs=reduction | {"ROWS": REDUCTION_ROWS, "STAGES": REDUCTION_STAGES},
            warps=(4, 1),
            grid=("groups", "tile_capacity", str(tile // REDUCTION_ROWS)),
        ),
        _variant(
            latent_chunk_kernel,
            dtype,
            page_dtype,
            constexprs=chunk,
            warps=(CHUNK_WARPS, chunk_stages(dtype)),
            grid=(str(shape.num_heads), f"num_rows / {chunk['TILE']} + num_requests + 1", "1"),
        ),
    )


def _variant(
    kernel,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    *,
    constexprs: dict[str, int | bool],
    warps: tuple[int, int],  # and stages
    grid: tuple[str, str, str],
) -> KernelVariant:
    tensors = ("q", "q_rope", "latents", "k_rope", "queries", "norm", "attended", "q_nope", "kv", "rows")
    types = dict.fromkeys(tensors, pointer(dtype)) | {"pages": pointer(page_dtype)}
    types |= dict.fromkeys(FLOAT32_ARGUMENTS, pointer(torch.float32))
    types |= dict.fromkeys(STRIDES, "i32:16")
    types |= dict.fromkeys(INT32_ARGUMENTS, pointer(torch.int32)) | dict.fromkeys(FP32_ARGUMENTS, "fp32")
    return KernelVariant(
        name=kernel.__name__.removesuffix("_kernel"),
        kernel=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs},
        constexprs=constexprs,
        num_warps=warps[0],
        num_stages=warps[1],
        grid=grid,
    )
