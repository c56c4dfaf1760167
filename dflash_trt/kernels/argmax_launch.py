"""How the kernels of `argmax.py` are launched: scratch memory, order, grids, and ahead-of-time variants.

The cuda backend calls `draft_tokens`; the plugin library compiles the order of the kernels and the table of their
scratch tensors (`rules.py`).
"""

from typing import Any

import torch
from torch import Tensor

from dflash_trt.core.dtype import torch_dtype
from dflash_trt.kernels import argmax
from dflash_trt.kernels.argmax import PIECES, TILE
from dflash_trt.kernels.capacity import MAX_CANDIDATES, choice_capacity, next_power_of_2
from dflash_trt.kernels.sampling_scratch import Scratch

DRAFT_GRIDS = {"tile_argmax": ("num_rows", "num_tiles", "1"), "combine_argmax": ("num_rows", "1", "1")}
DRAFT_KERNELS = tuple(DRAFT_GRIDS)  # without "_kernel", in the order of their launches
DRAFT_WARPS = {"tile_argmax": 8, "combine_argmax": 8}
DRAFT_SCRATCH = (
    Scratch("tile_max", "float32", per_tile=1),
    Scratch("tile_argmax", "int32", per_tile=1),
    Scratch("piece_best", "int64", per_tile=PIECES),
)


def draft_tokens(
    logits: Tensor,  # F [R*K, V], contiguous
    temperature: Tensor,  # float32 [R]
    seed: Tensor,  # int64 [R]
    draft_stream: Tensor,  # int32 [R]
    next_context_lens: Tensor,  # int32 [R]
    draft_to_target: Tensor | None = None,  # int64 [V]
    *,
    num_choices: int,  # C
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.draft_tokens`; tokens int32 [R, K], choices int32 [R, K*C] and chances float32 [R, K*C].

    Those of requests whose drafts are not drawn apart are 0. Two launches; allocates results and scratch tensors.
    """
    num_rows, vocab_size = logits.shape
    num_requests, num_tiles = len(temperature), -(-vocab_size // TILE)
    assert num_rows % num_requests == 0 and logits.is_contiguous()
    assert 0 < num_choices <= min(MAX_CANDIDATES, vocab_size)
    num_slots = num_rows // num_requests

    def new(dtype: torch.dtype, num_columns: int) -> Tensor:
        return torch.empty((num_requests, num_slots * num_columns), dtype=dtype, device=logits.device)

    drafts = new(torch.int32, 1), new(torch.int32, num_choices), new(torch.float32, num_choices)
    arguments: dict[str, Any] = dict(zip(("token_ids", "draft_choices", "draft_chances"), drafts, strict=True))
    arguments |= {s.name: new(torch_dtype(s.dtype), num_tiles * s.per_tile) for s in DRAFT_SCRATCH}
    arguments |= {"logits": logits, "temperature": temperature, "seed": seed, "draft_stream": draft_stream}
    arguments |= {"next_context_lens": next_context_lens, "vocab_size": vocab_size, "num_tiles": num_tiles}
    # without a draft vocabulary it is not read: any tensor of the type stands in
    arguments |= {"draft_to_target": seed if draft_to_target is None else draft_to_target}
    arguments |= {"num_slots": num_slots, "num_choices": num_choices}
    sizes = {"num_rows": num_rows, "num_tiles": num_tiles}
    for name, grid in DRAFT_GRIDS.items():
        kernel = getattr(argmax, f"{name}_kernel")
        constants = draft_constants(
            name, vocab_size=vocab_size, has_map=draft_to_target is not None, num_choices=num_choices
        )
        given = {key: arguments[key] for key in kernel.arg_names if key not in constants}
        kernel[tuple(sizes.get(size, 1) for size in grid)](
            **given, **constants, num_warps=DRAFT_WARPS[name], enable_fp_fusion=True
        )
    return drafts


def draft_constants(name: str, *, vocab_size: int, has_map: bool, num_choices: int) -> dict[str, int | bool]:
    known = {
        "TILE": TILE,
        "TILES": next_power_of_2(-(-vocab_size // TILE)),
        "PIECES": PIECES,
        "HAS_MAP": has_map,
        "NUM_CHOICES": choice_capacity(num_choices),
    }
    kernel: Any = getattr(argmax, f"{name}_kernel")
    return {key: known[key] for key in kernel.arg_names if key in known}
