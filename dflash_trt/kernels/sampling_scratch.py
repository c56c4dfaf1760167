"""The kernels that sample, adjust and draft, in the order of their launches: grids and scratch tensors.

Needs neither Triton nor PyTorch.
"""

from dataclasses import dataclass
from typing import Final

from dflash_trt.core.dtype import DType

TILE: Final = 4096  # logits per program
PIECES: Final = 32  # per tile; the k-th largest of all their maxima is a floor under the k-th largest logit
LIST_CAPACITY: Final = 8192  # tokens above the floor; a row with more of them is searched in full
BINS: Final = 1024  # per histogram


@dataclass(frozen=True, slots=True)
class Scratch:
    """A scratch tensor: its elements for each row of logits, and for each tile of each row."""

    name: str
    dtype: DType
    per_row: int = 0
    per_tile: int = 0


SCRATCH = (
    Scratch("tile_mass", "int64", per_tile=1),
    Scratch("tile_max", "float32", per_tile=1),
    Scratch("tile_argmax", "int32", per_tile=1),
    Scratch("tile_sum", "float32", per_tile=1),
    Scratch("tile_scaled_sum", "float32", per_tile=1),
    Scratch("piece_max", "float32", per_tile=PIECES),
    Scratch("row_max", "float32", per_row=1),
    Scratch("row_log_sum", "float32", per_row=1),
    Scratch("row_mode", "int32", per_row=1),
    Scratch("row_floor", "float32", per_row=1),
    Scratch("row_threshold", "float32", per_row=1),
    Scratch("list_count", "int32", per_row=1),
    Scratch("list_values", "float32", per_row=LIST_CAPACITY),
    Scratch("bins", "int64", per_row=BINS),
    Scratch("tile_kept", "float32", per_tile=1),
    Scratch("row_outcome", "int32", per_row=1),
    Scratch("row_score", "float32", per_row=1),
    Scratch("row_token", "int32", per_row=1),
    Scratch("tile_score", "float32", per_tile=1),
    Scratch("tile_token", "int32", per_tile=1),
)
DRAFT_SCRATCH = (
    Scratch("tile_max", "float32", per_tile=1),
    Scratch("tile_argmax", "int32", per_tile=1),
    Scratch("piece_best", "int64", per_tile=PIECES),
)
# By the kernel's name without "_kernel".
_ROWS = ("num_rows", "1", "1")
_TILES = ("num_rows", "num_tiles", "1")
SAMPLING_GRIDS = {
    "tile_statistics": _TILES,
    "row_bounds": _ROWS,
    "collect": _TILES,
    "row_threshold": _ROWS,
    "kept_mass": _TILES,
    "test_drafts": _ROWS,
    "tile_draw": _TILES,
    "draw": _ROWS,
    "accept": ("num_requests", "1", "1"),
}
RULE_GRIDS = {"count_tokens": ("num_requests", "num_tiles", "1"), "adjust": _TILES, "raw_logprobs": _ROWS}
SCORE_GRIDS = {"tile_top": _TILES, "row_top": _ROWS}
DRAFT_GRIDS = {"tile_argmax": _TILES, "combine_argmax": _ROWS}


def num_tiles(vocab_size: int) -> int:
    return -(-vocab_size // TILE)
