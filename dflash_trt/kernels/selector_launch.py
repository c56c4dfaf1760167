"""Launches of the kernels of `selector.py`: scratch memory, order, grids, and ahead-of-time variants."""

from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.kernels import selector
from dflash_trt.kernels.launching import FLOATS, MAX_CANDIDATES, check, check_tensor, launch, next_power_of_2
from dflash_trt.kernels.selector import block_conv_kernel

TILE: Final = 4096  # logits per program
MAX_KEYS: Final = 4096  # numbers of a codebook that the walk reads at once
SELECTOR_GRIDS: Final = {  # by name without "_kernel", in the order of the launches
    "tile_candidates": ("num_rows", "num_tiles", "1"),
    "merge_candidates": ("num_rows", "1", "1"),
    "walk": ("num_requests", "1", "1"),
}
REQUEST_COLUMNS: Final = ("bonus_tokens", "temperature", "seed", "draft_stream", "next_context_lens")
# Threads that share a sum of products write it to the same place. Fused, it would be rounded otherwise in some.
SYMMETRIC: Final = ("walk",)
SELECTOR_WARPS: Final = {"tile_candidates": 8, "merge_candidates": 4, "walk": 4}


def select_tokens(
    logits: Tensor,  # F [R*K, V], contiguous
    hidden: Tensor,  # F [R*K, r]
    codebooks: tuple[Tensor, Tensor],  # F [V, r] each: predecessors, successors
    requests: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.select_tokens`; int32 tokens [R, K], and int32 candidates and float32 probs [R, K*top_k].

    `requests` are bonus_tokens int32, temperature float32, seed int64, draft_stream int32 and next_context_lens int32,
    [R] each. Three launches; allocates the results and the scratch tensors.
    """
    (num_rows, vocab_size), num_requests = logits.shape, len(requests[0])
    num_tiles, rank = -(-vocab_size // TILE), hidden.shape[1]
    _check(logits, hidden, codebooks, num_requests, top_k)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    num_slots = num_rows // num_requests
    token_ids, candidates = (new(torch.int32, num_requests, num_slots * columns) for columns in (1, top_k))
    draft_topk_probs = new(torch.float32, num_requests, num_slots * top_k)
    arguments: dict[str, Any] = {
        "logits": logits,
        "tile_rankings": new(torch.int64, num_rows, num_tiles, top_k),
        "candidates": candidates,
        "candidate_logits": new(torch.float32, num_rows, top_k),
        "hidden": hidden,
        "predecessor": codebooks[0],
        "successor": codebooks[1],
        "token_ids": token_ids,
        "draft_topk_probs": draft_topk_probs,
        "vocab_size": vocab_size,
        "num_rankings": num_tiles * top_k,
        "num_slots": num_slots,
        "rank": rank,
    } | dict(zip(REQUEST_COLUMNS, requests, strict=True))
    sizes = {"num_rows": num_rows, "num_tiles": num_tiles, "num_requests": num_requests}
    constants = selector_constants(vocab_size=vocab_size, top_k=top_k, rank=rank)
    for name, grid in SELECTOR_GRIDS.items():
        launch(
            getattr(selector, f"{name}_kernel"),
            tuple(sizes.get(size, 1) for size in grid),
            arguments,
            constants,
            num_warps=SELECTOR_WARPS[name],
            has_fp_fusion=name not in SYMMETRIC,
        )
    return token_ids, candidates, draft_topk_probs


def selector_constants(*, vocab_size: int, top_k: int, rank: int) -> dict[str, int]:
    candidates = next_power_of_2(top_k)
    return {
        "TILE": TILE,
        "TOP_K": top_k,
        "RANKINGS": next_power_of_2(-(-vocab_size // TILE) * top_k),
        "CANDIDATES": candidates,
        "RANKS": min(next_power_of_2(rank), MAX_KEYS // candidates),
    }


def _check(logits: Tensor, hidden: Tensor, codebooks: tuple[Tensor, Tensor], num_requests: int, top_k: int) -> None:
    num_rows, vocab_size = logits.shape
    check_tensor("logits", logits, dtype=FLOATS, shape=[None, None])
    check_tensor("hidden", hidden, dtype=FLOATS, shape=[num_rows, None])
    for name, codebook in zip(("predecessor", "successor"), codebooks, strict=True):
        check_tensor(name, codebook, dtype=FLOATS, shape=[None, hidden.shape[1]])
        is_long = len(codebook) >= vocab_size
        check(is_long, name, expected=f"{vocab_size} rows", found=len(codebook), hint="One for every token.")
    is_whole = num_requests > 0 and num_rows % num_requests == 0
    check(is_whole, "logits", expected=f"as many rows for each of {num_requests}", found=num_rows, hint="K each.")
    most = min(MAX_CANDIDATES, vocab_size)
    check(0 < top_k <= most, "top_k", expected=f"1 to {most}", found=top_k, hint="`unsupported` refuses more.")


MAX_BLOCK: Final = 1024  # channels of a program
CONV_WARPS: Final = 4


def block_conv(
    x: Tensor,  # F [R*S, H]
    filters: Tensor,  # F [R*S, J * groups]; rows may be further apart
    base: Tensor,  # F [1, J, H]
    *,
    num_slots: int,  # S
) -> Tensor:
    """See `Ops.block_conv`; one launch."""
    num_rows, hidden_size = x.shape
    num_taps = base.shape[1]
    check_tensor("x", x, dtype=FLOATS, shape=[None, None])
    check_tensor(
        "filters", filters, dtype=x.dtype, shape=[num_rows, None], row_stride_is_free=True, may_be_unaligned=True
    )
    check_tensor("base", base, dtype=x.dtype, shape=[1, None, hidden_size])
    num_groups, uneven = divmod(filters.shape[1], num_taps)
    is_even = num_rows % num_slots == 0 and not uneven and num_groups > 0 and hidden_size % num_groups == 0
    expected = f"whole blocks of {num_slots} slots, and {num_taps} filters for each group of {hidden_size} channels"
    check(is_even, "filters", expected=expected, found=list(filters.shape), hint="See `Ops.block_conv`.")
    out = torch.empty_like(x)
    constants = block_conv_constants(hidden_size, num_groups=num_groups, num_taps=num_taps)
    block_conv_kernel[(num_rows, -(-hidden_size // constants["BLOCK"]))](
        x,
        filters,
        base,
        out,
        filters.stride(0),
        num_slots,
        hidden_size,
        **constants,
        num_warps=CONV_WARPS,
        enable_fp_fusion=True,
    )
    return out


def block_conv_constants(hidden_size: int, *, num_groups: int, num_taps: int) -> dict[str, int]:
    block = min(MAX_BLOCK, next_power_of_2(hidden_size))
    return {"GROUP_SIZE": hidden_size // num_groups, "TAPS": num_taps, "BLOCK": block}
