"""The kernels of drafters as they are launched: to be compiled ahead and looked at."""

import torch

from dflash_trt.kernels import paged_rows, paged_rows_launch, selector, selector_launch
from dflash_trt.kernels.launching import constants_of
from dflash_trt.kernels.selector import block_conv_kernel
from plugins.aot.page_variants import previous_rows_variant
from plugins.aot.variant import KernelVariant, pointer

INT32 = (
    "bonus_tokens",
    "draft_stream",
    "next_context_lens",
    "token_ids",
    "candidates",
    "positions",
    "token_offsets",
    "context_lens",
)
TYPES = {name: pointer(torch.int32) for name in (*INT32, "page_table", "lengths")}
TYPES |= {name: pointer(torch.float32) for name in ("candidate_logits", "temperature", "draft_topk_probs")}
TYPES |= {name: pointer(torch.int64) for name in ("tile_rankings", "seed")}
SIZES = ("num_slots", "vocab_size", "num_rankings", "rank", "width", "num_requests", "pages_per_request", "page_shift")
TYPES |= dict.fromkeys((*SIZES, "filter_stride", "hidden_size"), "i32")


def block_conv_variant(dtype: torch.dtype, *, hidden_size: int, group_size: int, num_taps: int) -> KernelVariant:
    """The grid uses num_rows."""
    num_groups = hidden_size // group_size
    constants = selector_launch.block_conv_constants(hidden_size, num_groups=num_groups, num_taps=num_taps)
    return _variant(
        "block_conv",
        block_conv_kernel,
        dtype,
        constants,
        grid=("num_rows", str(-(-hidden_size // constants["BLOCK"])), "1"),
        num_warps=selector_launch.CONV_WARPS,
    )


def selector_variants(dtype: torch.dtype, *, vocab_size: int, top_k: int, rank: int) -> list[KernelVariant]:
    """In the order of their launches. Grids use num_requests, num_rows and num_tiles."""
    constants = selector_launch.selector_constants(vocab_size=vocab_size, top_k=top_k, rank=rank)
    return [
        _variant(
            name,
            getattr(selector, f"{name}_kernel"),
            dtype,
            constants_of(getattr(selector, f"{name}_kernel"), constants),
            grid=selector_launch.SELECTOR_GRIDS[name],
            num_warps=selector_launch.SELECTOR_WARPS[name],
        )
        for name in selector_launch.SELECTOR_GRIDS
    ]


def paged_rows_variants(dtype: torch.dtype, *, width: int, max_requests: int) -> list[KernelVariant]:
    """Grids use num_rows and num_requests."""
    block = paged_rows_launch.row_block(width)
    last = _variant(
        "last_rows",
        paged_rows.last_rows_kernel,
        dtype,
        {"BLOCK": block},
        grid=("num_requests", str(-(-width // block)), "1"),
        num_warps=paged_rows_launch.ROW_WARPS,
    )
    return [previous_rows_variant(dtype, width=width, max_requests=max_requests, is_pooled=False), last]


def _variant(
    name: str,
    kernel: object,
    dtype: torch.dtype,
    constants: dict[str, int],
    *,
    grid: tuple[str, str, str],
    num_warps: int,
) -> KernelVariant:
    arguments: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    return KernelVariant(
        name=name,
        kernel=kernel,
        signature={name: TYPES.get(name, pointer(dtype)) for name in arguments if name not in constants},
        constexprs=constants,
        num_warps=num_warps,
        num_stages=1,
        grid=grid,
    )
