"""The kernels of latent attention as PyTorch's launcher passes them: to be compiled ahead and looked at."""

from dataclasses import replace

import torch

from dflash_trt.kernels import latent_attention_launch as launch
from dflash_trt.kernels.latent_pages import store_latents_kernel
from dflash_trt.kernels.latent_rules import LatentShape
from dflash_trt.kernels.launch_rules import MIN_DIRECT_ROWS
from dflash_trt.kernels.rope_and_pages_launch import HEADS_PER_PROGRAM, NUM_WARPS
from plugins.aot.latent_variants import (
    latent_attention_variant,
    latent_chunk_variant,
    latent_reduction_variant,
    latent_variant,
)
from plugins.aot.variant import KernelVariant, pointer


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
    """In the order of their launches. Grids use num_requests, num_rows, tile_capacity, work_slots and groups."""
    tile = launch.latent_tile(dtype, page_dtype)
    head_blocks = -(-shape.num_heads // HEADS_PER_PROGRAM)
    chunk = latent_chunk_variant(shape, dtype, nope_dim=nope_dim, value_dim=value_dim, is_pooled=False)
    attention = latent_attention_variant(shape, dtype, page_dtype, page_size=page_size, is_pooled=False)
    not_read = {"state_pools": pointer(torch.int32)}  # another tensor stands in its place
    reduction = latent_reduction_variant(shape, dtype, tile=tile, page_size=page_size, num_requests=num_requests)
    return (
        latent_variant(
            "store_latents",
            store_latents_kernel,
            (dtype, page_dtype),
            launch.store_constants(shape, num_requests) | {"IS_PAIRED": True, "STORES_ROWS": True},
            num_warps=NUM_WARPS,
            grid=("num_rows", str(1 + head_blocks), "1"),
        ),
        replace(attention, name="latent_attention", signature=dict(attention.signature) | not_read),
        replace(reduction, name="attention_reduction"),
        replace(
            chunk,
            name="latent_chunk",
            signature=dict(chunk.signature) | not_read,
            grid=(
                str(shape.num_heads),
                f"num_rows / {chunk.constexprs['TILE']} + num_rows / {MIN_DIRECT_ROWS} + 1",
                "1",
            ),
        ),
    )
