"""Variants of the kernels of latent attention to be compiled, as the launchers in `kernels/` pass them.

Sizes of a latent and of its heads are compiled in, their number is not: a library has the latents of the engines that
it is made for alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dflash_trt.core.dtype import DType, FloatDType, dtype_name, torch_dtype
from dflash_trt.kernels import latent_attention_launch as launch
from dflash_trt.kernels.attention_launch import REDUCTION_ROWS, REDUCTION_STAGES
from dflash_trt.kernels.attention_reduction import attention_reduction_kernel
from dflash_trt.kernels.head_product import head_product_kernel
from dflash_trt.kernels.head_product_launch import NUM_STAGES as HEAD_PRODUCT_STAGES
from dflash_trt.kernels.head_product_launch import NUM_WARPS as HEAD_PRODUCT_WARPS
from dflash_trt.kernels.head_product_launch import head_product_constants
from dflash_trt.kernels.latent_attention import latent_attention_kernel
from dflash_trt.kernels.latent_attention_launch import (
    CHUNK_WARPS,
    KV_WARPS,
    chunk_constants,
    chunk_stages,
    kv_constants,
    kv_stages,
)
from dflash_trt.kernels.latent_chunk import latent_chunk_kernel, latent_kv_kernel
from dflash_trt.kernels.latent_pages import write_latents_kernel
from dflash_trt.kernels.latent_rules import LatentShape
from dflash_trt.kernels.launch_rules import NO_CHUNK
from dflash_trt.kernels.launching import next_power_of_2, request_capacity
from dflash_trt.kernels.rope_and_pages_launch import NUM_WARPS
from plugins.aot.attention_variants import attention_plan_variant
from plugins.aot.variant import KernelVariant, pointer

_TYPES: Final = {
    pointer(torch.float32): ("partials", "partial_stats", "log_sums", "sinks", "inv_freq"),
    pointer(torch.int32): ("plan", "positions", "token_offsets", "context_lens", "page_table"),
    pointer(torch.int64): ("state_pools",),
    "fp32": ("score_scale", "k_scale", "amplitude", "eps"),
    "i32:16": ("latent_stride", "k_stride", "q_stride", "q_pitch"),
}
_OF_F: Final = (
    *("q", "q_nope", "q_rope", "latents", "k_rope", "queries", "norm"),
    *("k_factor", "v_factor", "kv", "rows", "kept", "direct", "attended"),
)
_ZEROS: Final = 1024  # of `direct`, that a program stores at once


@dataclass(frozen=True, kw_only=True, order=True)
class LatentKernels:
    """The latents of one kind, for steps of at most `max_requests` requests."""

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    page_dtype: DType
    page_size: int
    max_requests: int
    is_split_fixed: bool = False

    def variants(self, dtype: FloatDType) -> tuple[KernelVariant, ...]:
        """Those of a plugin, in the order of their launches."""
        return tuple(self._variants(torch_dtype(dtype), torch_dtype(self.page_dtype)))

    def _variants(self, dtype: torch.dtype, page_dtype: torch.dtype) -> Iterator[KernelVariant]:
        shape = LatentShape(num_heads=1, latent_dim=self.latent_dim, rope_dim=self.rope_dim)
        tile = launch.latent_tile(dtype, page_dtype)
        key_block = launch.latent_key_block(dtype=dtype, page_size=self.page_size)
        yield write_latents_variant(
            shape, dtype, page_dtype, max_requests=self.max_requests, has_aligned_values=self.value_dim % 16 == 0
        )
        yield latent_plan_variant(tile=tile, key_block=key_block, max_requests=self.max_requests)
        yield latent_attention_variant(shape, dtype, page_dtype, page_size=self.page_size, is_pooled=True)
        yield latent_reduction_variant(
            shape, dtype, tile=tile, page_size=self.page_size, num_requests=self.max_requests
        )
        if self.is_split_fixed:
            yield head_product_variant(self.nope_dim, self.latent_dim, dtype)
            yield head_product_variant(self.latent_dim, self.value_dim, dtype)
            return
        sizes = {"nope_dim": self.nope_dim, "value_dim": self.value_dim}
        chunk = latent_chunk_variant(shape, dtype, **sizes, is_pooled=True)
        tile, key_block = (int(chunk.constexprs[name]) for name in ("TILE", "KEY_BLOCK"))
        yield latent_plan_variant(tile=tile, key_block=key_block, max_requests=self.max_requests)
        yield latent_kv_variant(shape, dtype, **sizes)
        yield chunk


def latent_plan_variant(*, tile: int, key_block: int, max_requests: int) -> KernelVariant:
    """With as many tiles as the requests that it serves may have."""
    variant = attention_plan_variant(tile=tile, key_block=key_block, has_block=False, max_requests=max_requests)
    return replace(variant, grid=("tile_capacity + work_slots", "1", "1"))


def write_latents_variant(
    shape: LatentShape, dtype: torch.dtype, page_dtype: torch.dtype, *, max_requests: int, has_aligned_values: bool
) -> KernelVariant:
    requests = request_capacity(max_requests)
    variant = latent_variant(
        f"write_latents_{_name(shape, dtype, page_dtype)}_r{requests}{'_v16' if has_aligned_values else ''}",
        write_latents_kernel,
        (dtype, page_dtype),
        {"ROW": shape.row_size, "ROW_DIM": next_power_of_2(shape.row_size), "ZEROS": _ZEROS, "REQUESTS": requests},
        num_warps=NUM_WARPS,
        grid=("num_rows", "1", "1"),
    )
    return _with_words(variant, "i32:16", "direct_columns") if has_aligned_values else variant


def latent_attention_variant(
    shape: LatentShape, dtype: torch.dtype, page_dtype: torch.dtype, *, page_size: int, is_pooled: bool
) -> KernelVariant:
    tile = launch.latent_tile(dtype, page_dtype)
    constants = launch.attention_constants(shape, tile=tile, dtype=dtype, page_size=page_size)
    keys = f"k{constants['KEY_BLOCK']}{'' if constants['IS_IN_ONE_PAGE'] else '_of_pages'}"
    return latent_variant(
        f"latent_attention_{_name(shape, dtype, page_dtype)}_{keys}{'_pooled' if is_pooled else ''}",
        latent_attention_kernel,
        (dtype, page_dtype),
        constants | {"POOLED": is_pooled, "HAS_LOG_SUMS": False},
        num_warps=launch.ATTENTION_WARPS,
        num_stages=launch.attention_stages(dtype),
        is_fenced=True,
        grid=("groups", "tile_capacity + work_slots", "1"),
    )


def latent_reduction_variant(
    shape: LatentShape, dtype: torch.dtype, *, tile: int, page_size: int, num_requests: int
) -> KernelVariant:
    keys, requests = launch.latent_key_block(dtype=dtype, page_size=page_size), request_capacity(num_requests)
    constants = {"HEAD_DIM": shape.latent_dim, "DIM": launch.latent_constants(shape)["LATENT_DIM"], "TILE": tile}
    constants |= {"KEY_BLOCK": keys, "REQUESTS": requests, "HAS_BLOCK": False, "CHUNK": NO_CHUNK, "PLANNED": True}
    return latent_variant(
        f"latent_reduction_{dtype_name(dtype)}_c{shape.latent_dim}_t{tile}_k{keys}_r{requests}",
        attention_reduction_kernel,
        (dtype, dtype),
        constants | {"ROWS": REDUCTION_ROWS, "STAGES": REDUCTION_STAGES},
        num_warps=4,
        grid=("groups", "tile_capacity", str(tile // REDUCTION_ROWS)),
    )


def latent_kv_variant(shape: LatentShape, dtype: torch.dtype, *, nope_dim: int, value_dim: int) -> KernelVariant:
    constants = kv_constants(
        nope_dim=nope_dim, value_dim=value_dim, latent_dim=shape.latent_dim, rope_dim=shape.rope_dim, dtype=dtype
    )
    blocks = sum(-(-size // constants["COLUMNS"]) for size in (nope_dim, value_dim))
    return latent_variant(
        f"latent_kv_{_direct_name(shape, dtype, nope_dim, value_dim)}",
        latent_kv_kernel,
        (dtype, dtype),
        constants,
        num_warps=KV_WARPS,
        num_stages=kv_stages(dtype),
        grid=(f"heads * {blocks}", "tile_capacity + work_slots", "1"),
    )


def latent_chunk_variant(
    shape: LatentShape, dtype: torch.dtype, *, nope_dim: int, value_dim: int, is_pooled: bool
) -> KernelVariant:
    constants = chunk_constants(
        nope_dim=nope_dim, value_dim=value_dim, latent_dim=shape.latent_dim, rope_dim=shape.rope_dim, dtype=dtype
    )
    pooled = "_pooled" if is_pooled else ""
    variant = latent_variant(
        f"latent_chunk_{_direct_name(shape, dtype, nope_dim, value_dim)}{pooled}",
        latent_chunk_kernel,
        (dtype, dtype),
        constants | {"POOLED": is_pooled},
        num_warps=CHUNK_WARPS,
        num_stages=chunk_stages(dtype),
        is_fenced=True,
        grid=("heads", "tile_capacity + work_slots", "1"),
    )
    return variant if nope_dim % 16 == 0 else _with_words(variant, "i32", "q_stride", "q_pitch")


def head_product_variant(in_size: int, out_size: int, dtype: torch.dtype) -> KernelVariant:
    """Grids use num_rows and heads."""
    constants = head_product_constants(in_size, out_size, dtype=dtype, is_transposed=False)
    return KernelVariant(
        name=f"head_product_{dtype_name(dtype)}_{in_size}x{out_size}",
        kernel=head_product_kernel,
        signature=dict.fromkeys(("x", "factor", "out"), pointer(dtype))
        | dict.fromkeys(("num_rows", "heads", "factor_stride", "out_stride"), "i32"),
        constexprs=constants,
        num_warps=HEAD_PRODUCT_WARPS,
        num_stages=HEAD_PRODUCT_STAGES,
        grid=(
            f"(num_rows + {constants['TOKENS'] - 1}) / {constants['TOKENS']}",
            str(-(-out_size // constants["OUT"])),
            "heads",
        ),
    )


def latent_variant(
    name: str,
    kernel: Any,
    dtypes: tuple[torch.dtype, torch.dtype],  # of the network, and of pages
    constants: Mapping[str, int | bool],
    *,
    num_warps: int,
    num_stages: int = 1,
    is_fenced: bool = False,
    grid: tuple[str, str, str],
) -> KernelVariant:
    types = {argument: word for word, arguments in _TYPES.items() for argument in arguments}
    types |= dict.fromkeys(_OF_F, pointer(dtypes[0])) | {"pages": pointer(dtypes[1])}
    return KernelVariant(
        name=name,
        kernel=kernel,
        signature={argument: types.get(argument, "i32") for argument in kernel.arg_names if argument not in constants},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        is_fenced=is_fenced,
        grid=grid,
    )


def _name(shape: LatentShape, dtype: torch.dtype, page_dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)}_{dtype_name(page_dtype)}_c{shape.latent_dim}_p{shape.rope_dim}"


def _with_words(variant: KernelVariant, word: str, *arguments: str) -> KernelVariant:
    return replace(variant, signature=dict(variant.signature) | dict.fromkeys(arguments, word))


def _direct_name(shape: LatentShape, dtype: torch.dtype, nope_dim: int, value_dim: int) -> str:
    return f"{dtype_name(dtype)}_c{shape.latent_dim}_p{shape.rope_dim}_n{nope_dim}_v{value_dim}"
