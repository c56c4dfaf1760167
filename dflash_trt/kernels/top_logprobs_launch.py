"""Memory and launches of the kernels of `top_logprobs.py`."""

from typing import Any, Final

import torch
from torch import Tensor

from dflash_trt.core.sampling import MAX_TOP_LOGPROBS
from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.sampling_scratch import TILE
from dflash_trt.kernels.top_logprobs import row_top_kernel, tile_top_kernel

NUM_WARPS: Final = 8


def score_rows(
    logits: Tensor,  # F [any, V], contiguous
    num_top: int,
    *,
    rows: Tensor | None = None,  # int64 [M]; None means all
    tokens: Tensor | None = None,  # int64 [M]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Implements `backends.torch.logprobs.ScoreRows`.

    NaN is never a candidate; its row has NaN as results.
    """
    assert logits.is_contiguous() and num_top <= MAX_TOP_LOGPROBS
    rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
    num_rows, vocab_size = len(rows), logits.shape[1]
    num_top, num_tiles = min(num_top, vocab_size), -(-vocab_size // TILE)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    given: dict[str, Any] = {"logits": logits, "rows": rows, "tokens": rows if tokens is None else tokens}
    given |= {
        "values": empty(num_tiles, num_top),
        "columns": empty(num_tiles, num_top, dtype=torch.int32),
        "tile_max": empty(num_tiles),
        "tile_sum": empty(num_tiles),
        "top_tokens": empty(num_top, dtype=torch.int32),
        "top_logprobs": empty(num_top),
        "token_logprobs": empty(),
    }
    given |= {"vocab_size": vocab_size, "num_top": num_top, "num_tiles": num_tiles}
    compiled_in = constants(vocab_size, has_tokens=tokens is not None)
    _launch(tile_top_kernel, (num_rows, num_tiles), given, compiled_in)
    _launch(row_top_kernel, (num_rows,), given, compiled_in)
    return given["top_tokens"], given["top_logprobs"], None if tokens is None else given["token_logprobs"]


def constants(vocab_size: int, *, has_tokens: bool) -> dict[str, int]:
    """Of both kernels."""
    num_tiles = -(-vocab_size // TILE)
    return {
        "TILE": TILE,
        "TILES": next_power_of_2(num_tiles),
        "CANDIDATES": next_power_of_2(num_tiles * MAX_TOP_LOGPROBS),
        "HAS_TOKENS": has_tokens,
    }


def _launch(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], compiled_in: dict[str, int]) -> None:
    own = {name: compiled_in[name] for name in kernel.arg_names if name in compiled_in}
    arguments = {name: given[name] for name in kernel.arg_names if name not in own}
    kernel[grid](**arguments, **own, num_warps=NUM_WARPS, enable_fp_fusion=False)
