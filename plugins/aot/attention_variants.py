"""Variants of the attention kernels to compile ahead of time, as `attention_launch.py` passes them."""

from dataclasses import replace

import torch

from dflash_trt.kernels.attention import attention_kernel
from dflash_trt.kernels.attention_launch import REDUCTION_ROWS, REDUCTION_STAGES, attention_constants
from dflash_trt.kernels.attention_partition import attention_plan_kernel
from dflash_trt.kernels.attention_plan import (
    PLAN_WARPS,
    TILES,
    attention_options,
    has_full_loop,
    key_block,
    num_parts,
    page_run,
    tiles_of,
)
from dflash_trt.kernels.attention_reduction import attention_reduction_kernel
from dflash_trt.kernels.launch_rules import NO_CHUNK
from dflash_trt.kernels.launching import request_capacity
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
    page_size: int | None = None,
    first_key: int = 0,
    chunk: int = NO_CHUNK,
    is_split_fixed: bool = False,
) -> tuple[KernelVariant, ...]:
    """Attention and reduction of one geometry, for every tile: what is compiled ahead for a layer of this kind.

    With a `page_size` they are what PyTorch's launcher compiles: a plan and pages are given. A plugin has neither, but
    a plan for splits of a fixed length, whose kernel comes with them.
    """
    variants = []
    for tile in tiles_of(head_dim=head_dim, dtype=dtype, page_dtype=page_dtype, tiles=tiles):
        constants = attention_constants(head_dim=head_dim) | {
            "TILE": tile,
            "KEY_BLOCK": key_block(head_dim=head_dim, dtype=dtype),
            "REQUESTS": request_capacity(max_requests),
            "HAS_BLOCK": has_block,
            "CHUNK": chunk,
        }
        borders = f"chunk{chunk}_" if chunk else ""
        geometry = f"{borders}{'block' if has_block else 'step'}_d{head_dim}_t{tile}_r{constants['REQUESTS']}"
        types = "_".join(str(name).removeprefix("torch.") for name in (dtype, page_dtype))
        kind = (
            f"{'softcap_' if has_softcap else ''}{'chain_' if first_key else ''}{'splits_' if is_split_fixed else ''}"
        )
        name = f"{types}_{kind}{geometry}"
        variant = _attention_variant(name, dtype, page_dtype, constants, has_softcap, page_size, first_key)
        variants.append(_in_splits(variant) if is_split_fixed else variant)
        # Partial results are the same whatever the pages hold.
        name = f"{str(dtype).removeprefix('torch.')}_{'splits_' if is_split_fixed else ''}{geometry}"
        is_planned = page_size is not None or is_split_fixed
        variants.append(_reduction_variant(name, dtype, constants, is_planned=is_planned))
        if is_split_fixed:
            sizes = {"tile": tile, "key_block": int(constants["KEY_BLOCK"])}
            variants.append(attention_plan_variant(**sizes, has_block=False, max_requests=max_requests, chunk=chunk))
    return tuple(variants)


def attention_plan_variant(
    *, tile: int, key_block: int, has_block: bool, max_requests: int = 256, chunk: int = NO_CHUNK
) -> KernelVariant:
    signature = dict.fromkeys(("plan", "token_offsets", "context_lens"), _INT)
    signature |= dict.fromkeys(("num_requests", "block_rows", "rows_per_tile", "max_lag", "window_step"), "i32")
    signature |= dict.fromkeys(("min_rows", "max_rows", "work_slots", "split_blocks"), "i32")
    requests, borders = request_capacity(max_requests), f"chunk{chunk}_" if chunk else ""
    return KernelVariant(
        name=f"attention_plan_{borders}{'block' if has_block else 'step'}_t{tile}_k{key_block}_r{requests}",
        kernel=attention_plan_kernel,
        signature=signature,
        constexprs={"TILE": tile, "KEY_BLOCK": key_block, "REQUESTS": requests, "HAS_BLOCK": has_block, "CHUNK": chunk},
        grid=("num_rows / rows_per_tile + num_requests + work_slots", "1", "1"),
        num_warps=PLAN_WARPS,
        num_stages=1,
    )


PAGE_RUN = 1  # a library serves pages of every size
_TILE_CAPACITY = "num_rows / ({tile} / heads_per_kv) + num_requests"
_FLOAT = pointer(torch.float32)
_INT = pointer(torch.int32)


def _attention_variant(
    suffix: str,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    constants: dict[str, int | bool],
    has_softcap: bool,
    page_size: int | None,
    first_key: int,
) -> KernelVariant:
    tile, head_dim = int(constants["TILE"]), int(constants["HEAD_DIM"])
    parts = num_parts(tile=tile, head_dim=head_dim)
    run = PAGE_RUN if page_size is None else page_run(page_size=page_size, key_block=int(constants["KEY_BLOCK"]))
    signature = {"q": pointer(dtype), "pages": pointer(page_dtype), "state_pools": pointer(torch.int64)}
    signature |= dict.fromkeys(("block_k", "block_v", "attended"), pointer(dtype))
    signature |= dict.fromkeys(("partials", "partial_stats"), _FLOAT)
    signature |= dict.fromkeys(("plan", "token_offsets", "context_lens", "page_table"), _INT)
    signature |= {"sinks": _FLOAT}
    signature |= dict.fromkeys(("score_scale", "k_scale", "v_scale", "softcap"), "fp32")
    signature |= {"num_requests": "i32", "block_rows": "i32", "block_k_stride": "i32:16", "block_v_stride": "i32:16"}
    signature |= dict.fromkeys(("pages_per_request", "kv_heads", "heads_per_kv", "heads_reciprocal"), "i32")
    signature |= dict.fromkeys(("page_shift", "state_index", "max_lag", "max_lead", "window_step"), "i32")
    signature |= dict.fromkeys(("min_rows", "max_rows", "work_slots", "has_sinks"), "i32")
    options = attention_options(tile=tile, head_dim=head_dim, dtype=dtype)
    return KernelVariant(
        name=f"attention_{suffix}",
        kernel=attention_kernel,
        signature=signature,
        constexprs=constants
        | {"PAGE_RUN": run, "HAS_SOFTCAP": has_softcap, "HAS_FULL_LOOP": has_full_loop(tile=tile)}
        | {"FIRST_KEY": first_key, "POOLED": page_size is None, "PLANNED": page_size is not None, "PARTS": parts},
        grid=(
            "kv_heads" if parts == 1 else f"kv_heads * {parts}",
            f"{_TILE_CAPACITY.format(tile=tile)} + work_slots",
            "1",
        ),
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
    )


def _in_splits(variant: KernelVariant) -> KernelVariant:
    """With a plan, and without the loop that would change the order of sums."""
    return replace(variant, constexprs={**variant.constexprs, "PLANNED": True, "HAS_FULL_LOOP": False})


def _reduction_variant(
    suffix: str, dtype: torch.dtype, constants: dict[str, int | bool], *, is_planned: bool
) -> KernelVariant:
    tile = int(constants["TILE"])
    signature = {"attended": pointer(dtype), "partials": _FLOAT, "partial_stats": _FLOAT}
    signature |= dict.fromkeys(("plan", "token_offsets", "context_lens"), _INT)
    signature |= {"sinks": _FLOAT}
    signature |= dict.fromkeys(("num_requests", "block_rows", "kv_heads", "heads_per_kv", "heads_reciprocal"), "i32")
    signature |= dict.fromkeys(("max_lag", "window_step", "min_rows", "max_rows", "work_slots", "has_sinks"), "i32")
    return KernelVariant(
        name=f"attention_reduction_{suffix}",
        kernel=attention_reduction_kernel,
        signature=signature,
        constexprs=constants | {"PLANNED": is_planned, "ROWS": REDUCTION_ROWS, "STAGES": REDUCTION_STAGES},
        grid=("kv_heads", _TILE_CAPACITY.format(tile=tile), str(tile // REDUCTION_ROWS)),
        num_warps=4,
        num_stages=1,
    )
