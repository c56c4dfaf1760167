"""Launches of the kernels of `argmax.py`, as the cuda backend calls them; `programs/sampling.py` has the plugin's."""

from typing import Any

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.kernels import argmax
from dflash_trt.kernels.capacity import MAX_CANDIDATES, next_power_of_2, topk_capacity
from dflash_trt.kernels.sampling_scratch import DRAFT_GRIDS, DRAFT_SCRATCH, PIECES, TILE

DRAFT_WARPS = {"tile_argmax": 8, "combine_argmax": 8}


def draft_tokens(
    logits: Tensor,  # F [R*K, V], contiguous
    temperature: Tensor,  # float32 [R]
    seed: Tensor,  # int64 [R]
    draft_stream: Tensor,  # int32 [R]
    next_context_lens: Tensor,  # int32 [R]
    draft_to_target: Tensor | None = None,  # int64 [V]
    *,
    draft_topk: int,  # C
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.draft_tokens`; int32 tokens [R, K] and top-k ids [R, K*C], float32 top-k probs [R, K*C].

    Requests without rejection sampling have zeros. Two launches; allocates results and scratch tensors.
    """
    num_rows, vocab_size = logits.shape
    num_requests, num_tiles = len(temperature), -(-vocab_size // TILE)
    assert num_rows % num_requests == 0 and logits.is_contiguous()
    assert 0 < draft_topk <= min(MAX_CANDIDATES, vocab_size)
    num_slots = num_rows // num_requests

    def new(dtype: torch.dtype, num_columns: int) -> Tensor:
        return torch.empty((num_requests, num_slots * num_columns), dtype=dtype, device=logits.device)

    drafts = new(torch.int32, 1), new(torch.int32, draft_topk), new(torch.float32, draft_topk)
    arguments: dict[str, Any] = dict(
        zip(("token_ids", "next_draft_topk_ids", "next_draft_topk_probs"), drafts, strict=True)
    )
    arguments |= {s.name: new(torch_dtype(s.dtype), num_tiles * s.per_tile) for s in DRAFT_SCRATCH}
    arguments |= {"logits": logits, "temperature": temperature, "seed": seed, "draft_stream": draft_stream}
    arguments |= {"next_context_lens": next_context_lens, "vocab_size": vocab_size, "num_tiles": num_tiles}
    # without a draft vocabulary it is not read: any tensor of the type stands in
    arguments |= {"draft_to_target": seed if draft_to_target is None else draft_to_target}
    arguments |= {"num_slots": num_slots, "draft_topk": draft_topk}
    sizes = {"num_rows": num_rows, "num_tiles": num_tiles}
    for name, grid in DRAFT_GRIDS.items():
        kernel = getattr(argmax, f"{name}_kernel")
        constants = draft_constants(
            name, vocab_size=vocab_size, has_map=draft_to_target is not None, draft_topk=draft_topk
        )
        given = {key: arguments[key] for key in kernel.arg_names if key not in constants}
        kernel[tuple(sizes.get(size, 1) for size in grid)](
            **given, **constants, num_warps=DRAFT_WARPS[name], enable_fp_fusion=True
        )
    return drafts


def draft_constants(name: str, *, vocab_size: int, has_map: bool, draft_topk: int) -> dict[str, int | bool]:
    known = {
        "TILE": TILE,
        "TILES": next_power_of_2(-(-vocab_size // TILE)),
        "PIECES": PIECES,
        "HAS_MAP": has_map,
        "DRAFT_TOPK": topk_capacity(draft_topk),
    }
    kernel: Any = getattr(argmax, f"{name}_kernel")
    return {key: known[key] for key in kernel.arg_names if key in known}
