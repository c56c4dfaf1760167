"""Launches of the kernels of `selector.py`: scratch memory, order, grids, and ahead-of-time variants."""

from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.kernels import selector
from dflash_trt.kernels.capacity import MAX_CANDIDATES, next_power_of_2
from dflash_trt.kernels.tensor_checks import check, check_tensor

TILE: Final = 4096  # logits per program
FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
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
    for name, grid in SELECTOR_GRIDS.items():
        kernel = getattr(selector, f"{name}_kernel")
        constants = selector_constants(name, vocab_size=vocab_size, top_k=top_k, rank=rank)
        given = {key: arguments[key] for key in kernel.arg_names if key not in constants}
        kernel[tuple(sizes.get(size, 1) for size in grid)](
            **given, **constants, num_warps=SELECTOR_WARPS[name], enable_fp_fusion=name not in SYMMETRIC
        )
    return token_ids, candidates, draft_topk_probs


def selector_constants(name: str, *, vocab_size: int, top_k: int, rank: int) -> dict[str, int]:
    candidates = next_power_of_2(top_k)
    known = {
        "TILE": TILE,
        "TOP_K": top_k,
        "RANKINGS": next_power_of_2(-(-vocab_size // TILE) * top_k),
        "CANDIDATES": candidates,
        "RANKS": min(next_power_of_2(rank), MAX_KEYS // candidates),
    }
    kernel: Any = getattr(selector, f"{name}_kernel")
    return {key: known[key] for key in kernel.arg_names if key in known}


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
