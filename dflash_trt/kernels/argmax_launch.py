"""How the kernels of `argmax.py` are launched: scratch memory, order, grids, and ahead-of-time variants.

The cuda backend calls `draft_tokens`; the plugin library compiles the order of the kernels and the table of their
scratch tensors (`rules.py`).
"""

from typing import Any

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.kernels import argmax
from dflash_trt.kernels.argmax import TILE
from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.sampling_scratch import Scratch

DRAFT_GRIDS = {"tile_argmax": ("num_rows", "num_tiles", "1"), "combine_argmax": ("num_rows", "1", "1")}
DRAFT_KERNELS = tuple(DRAFT_GRIDS)  # without "_kernel", in the order of their launches
DRAFT_WARPS = {"tile_argmax": 8, "combine_argmax": 1}
DRAFT_SCRATCH = (Scratch("tile_max", "float32", per_tile=1), Scratch("tile_argmax", "int32", per_tile=1))


def draft_tokens(
    logits: Tensor,  # F [R*K, V], contiguous
    temperature: Tensor,  # float32 [R]
    seed: Tensor,  # int64 [R]
    next_context_lens: Tensor,  # int32 [R]
    draft_to_target: Tensor | None = None,  # int64 [V]
) -> Tensor:
    """See `Ops.draft_tokens`; int32 [R, K]. Two launches; allocates the result and the scratch tensors."""
    num_rows, vocab_size = logits.shape
    num_requests, num_tiles = len(temperature), -(-vocab_size // TILE)
    assert num_rows % num_requests == 0 and logits.is_contiguous()
    token_ids = torch.empty((num_requests, num_rows // num_requests), dtype=torch.int32, device=logits.device)
    arguments: dict[str, Any] = {
        scratch.name: torch.empty((num_rows, num_tiles), dtype=torch_dtype(scratch.dtype), device=logits.device)
        for scratch in DRAFT_SCRATCH
    }
    arguments |= {"logits": logits, "temperature": temperature, "seed": seed, "token_ids": token_ids}
    arguments |= {"next_context_lens": next_context_lens, "vocab_size": vocab_size, "num_tiles": num_tiles}
    # without a draft vocabulary it is not read: any tensor of the type stands in
    arguments |= {"draft_to_target": seed if draft_to_target is None else draft_to_target}
    arguments |= {"num_slots": token_ids.shape[1]}
    sizes = {"num_rows": num_rows, "num_tiles": num_tiles}
    for name, grid in DRAFT_GRIDS.items():
        kernel = getattr(argmax, f"{name}_kernel")
        constants = draft_constants(name, vocab_size=vocab_size, has_map=draft_to_target is not None)
        given = {key: arguments[key] for key in kernel.arg_names if key not in constants}
        kernel[tuple(sizes.get(size, 1) for size in grid)](
            **given, **constants, num_warps=DRAFT_WARPS[name], enable_fp_fusion=True
        )
    return token_ids


def draft_constants(name: str, *, vocab_size: int, has_map: bool) -> dict[str, int | bool]:
    known = {"TILE": TILE, "TILES": next_power_of_2(-(-vocab_size // TILE)), "HAS_MAP": has_map}
    kernel: Any = getattr(argmax, f"{name}_kernel")
    return {key: known[key] for key in kernel.arg_names if key in known}
