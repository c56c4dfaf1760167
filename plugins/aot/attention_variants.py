"""Variants of the attention kernels to compile ahead of time, as `attention_launch.py` passes them."""

import torch

from dflash_trt.kernels.attention import attention_kernel
from dflash_trt.kernels.attention_launch import (
    MIN_FULL_LOOP_TILE,
    REDUCTION_ROWS,
    REDUCTION_SPLITS,
    TILES,
    attention_constants,
    attention_options,
)
from dflash_trt.kernels.attention_reduction import attention_reduction_kernel
from plugins.aot.variant import KernelVariant, pointer


def attention_variants(
    *,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    head_dim: int,
    has_block: bool,
    has_softcap: bool = False,
    max_requests: int = 256,
    tiles: tuple[int, ...] = TILES,
) -> tuple[KernelVariant, ...]:
    """Attention and reduction of one geometry, for every tile: what is compiled ahead for a layer of this kind."""
    variants = []
    for tile in tiles:
        constants = attention_constants(
            tile=tile, head_dim=head_dim, dtype=dtype, max_requests=max_requests, has_block=has_block
        )
        geometry = f"{'block' if has_block else 'step'}_d{head_dim}_t{tile}_r{constants['REQUESTS']}"
        types = "_".join(str(name).removeprefix("torch.") for name in (dtype, page_dtype))
        name = f"{types}_{'softcap_' if has_softcap else ''}{geometry}"
        variants.append(_attention_variant(name, dtype, page_dtype, constants, has_softcap))
        # Partial results are the same whatever the pages hold.
        variants.append(_reduction_variant(f"{str(dtype).removeprefix('torch.')}_{geometry}", dtype, constants))
    return tuple(variants)


_ROW_CAPACITY = "num_rows / ({tile} / heads_per_kv) + num_requests"
_FLOAT = pointer(torch.float32)
_INT = pointer(torch.int32)


def _attention_variant(
    suffix: str, dtype: torch.dtype, page_dtype: torch.dtype, constants: dict[str, int | bool], has_softcap: bool
) -> KernelVariant:
    tile = constants["TILE"]
    signature = {"q": pointer(dtype), "pages": pointer(page_dtype), "state_pools": pointer(torch.int64)}
    signature |= dict.fromkeys(("block_k", "block_v", "attended"), pointer(dtype))
    signature |= dict.fromkeys(("partials", "partial_stats"), _FLOAT)
    signature |= dict.fromkeys(("token_offsets", "context_lens", "page_table"), _INT)
    signature |= {"sinks": _FLOAT}
    signature |= dict.fromkeys(("score_scale", "k_scale", "v_scale", "softcap"), "fp32")
    signature |= {"num_requests": "i32", "block_rows": "i32", "block_k_stride": "i32:16", "block_v_stride": "i32:16"}
    signature |= dict.fromkeys(("pages_per_request", "kv_heads", "heads_per_kv", "page_shift", "state_index"), "i32")
    signature |= dict.fromkeys(("max_lag", "max_lead", "window_step"), "i32")
    signature |= dict.fromkeys(("min_rows", "max_rows", "work_slots", "has_sinks"), "i32")
    return KernelVariant(
        name=f"attention_{suffix}",
        kernel=attention_kernel,
        signature=signature,
        constexprs=constants
        | {"HAS_SOFTCAP": has_softcap, "HAS_FULL_LOOP": tile >= MIN_FULL_LOOP_TILE, "POOLED": True},
        grid=("kv_heads", f"{_ROW_CAPACITY.format(tile=tile)} + work_slots", "1"),
        **attention_options(tile=int(tile), head_dim=int(constants["HEAD_DIM"]), dtype=dtype),
    )


def _reduction_variant(suffix: str, dtype: torch.dtype, constants: dict[str, int | bool]) -> KernelVariant:
    tile = int(constants["TILE"])
    signature = {"attended": pointer(dtype), "partials": _FLOAT, "partial_stats": _FLOAT}
    signature |= dict.fromkeys(("token_offsets", "context_lens"), _INT)
    signature |= dict.fromkeys(("num_requests", "block_rows", "kv_heads", "heads_per_kv"), "i32")
    signature |= dict.fromkeys(("max_lag", "min_rows", "max_rows", "work_slots"), "i32")
    return KernelVariant(
        name=f"attention_reduction_{suffix}",
        kernel=attention_reduction_kernel,
        signature=signature,
        constexprs=constants | {"ROWS": REDUCTION_ROWS, "SPLITS": REDUCTION_SPLITS},
        grid=("kv_heads", _ROW_CAPACITY.format(tile=tile), str(tile // REDUCTION_ROWS)),
        num_warps=4,
        num_stages=1,
    )
