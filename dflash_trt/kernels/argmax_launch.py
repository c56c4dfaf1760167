"""How the kernels of `argmax.py` are launched, and their ahead-of-time variants. Allocates outputs only."""

import torch
from torch import Tensor

from dflash_trt.kernels.argmax import TILE, combine_argmax_kernel, tile_argmax_kernel
from dflash_trt.kernels.capacity import next_power_of_2


def argmax_tokens(logits: Tensor) -> Tensor:  # F [rows, V] -> int32 [rows]
    """The first largest of each row."""
    return shard_argmax(logits)[1]


def shard_argmax(logits: Tensor, *, first_token_id: int = 0) -> tuple[Tensor, Tensor]:
    """The largest logit of each row of a vocabulary shard, float32 [rows], and its token, int32 [rows]."""
    assert logits.is_contiguous()
    num_rows, vocab_size = logits.shape
    tiles = -(-vocab_size // TILE)
    tile_max = torch.empty((num_rows, tiles), dtype=torch.float32, device=logits.device)
    tile_argmax = torch.empty((num_rows, tiles), dtype=torch.int32, device=logits.device)
    tile_argmax_kernel[(num_rows, tiles)](
        logits, tile_max, tile_argmax, vocab_size, first_token_id, TILE=TILE, num_warps=8, enable_fp_fusion=True
    )
    return _combined(tile_max[None], tile_argmax[None])


def combine_shards(shard_max: Tensor, shard_argmax: Tensor) -> Tensor:  # [ranks, rows] each -> int32 [rows]
    """The token of the whole vocabulary from what every rank's `shard_argmax` gave, gathered."""
    return _combined(shard_max[..., None].contiguous(), shard_argmax[..., None].contiguous())[1]


def _combined(tile_max: Tensor, tile_argmax: Tensor) -> tuple[Tensor, Tensor]:
    """[parts, rows, tiles] each -> float32 [rows], int32 [rows]."""
    num_parts, num_rows, num_tiles = tile_max.shape
    token_ids = torch.empty(num_rows, dtype=torch.int32, device=tile_max.device)
    largest = torch.empty(num_rows, dtype=torch.float32, device=tile_max.device)
    combine_argmax_kernel[(num_rows,)](
        tile_max,
        tile_argmax,
        token_ids,
        largest,
        num_rows,
        num_tiles,
        num_parts,
        BLOCK=next_power_of_2(num_parts * num_tiles),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return largest, token_ids
