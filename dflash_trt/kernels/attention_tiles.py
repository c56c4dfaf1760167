"""Tiles of attention: how many rows a program takes, of which part of V, and with how many warps.

A tile's sums are float32 [TILE, DIM / parts] in registers. Above `WIDE_HEAD_DIM` two programs share a tile, each of
which has all scores and half of V; what is compiled for it spills no register on SM90, SM100 and SM103.
"""

import torch

from dflash_trt.kernels.launch_rules import FP8_MIN_TILE, WIDE_HEAD_DIM
from dflash_trt.kernels.tensor_checks import check

TILES = (16, 32, 64, 128)  # rows of a tile: query rows times query heads of one K/V head
MIN_FULL_LOOP_TILE = 64  # from here on masks cost more than a second loop
FIXED_TILE = 64  # with splits of a fixed length
WIDE_MAX_TILE = 64
# FP8 becomes float16 in registers, and shared memory holds float32 of a few rows alone.
_WIDE_MAX_FP8_TILE, _WIDE_MAX_FLOAT32_TILE = 32, 16
# Of larger tiles in float32 Triton 3.7 wants 560 to 1,072 of the 512 columns of tensor memory of an SM100.
_MAX_FLOAT32_TILE, _FLOAT32_TILE_ABOVE_128 = 64, 32


def tile_rows(query_rows: int, heads_per_kv: int, tiles: tuple[int, ...] = TILES) -> int:
    """The smallest of `tiles` that holds `query_rows` rows of a request, or the largest there is."""
    check(
        heads_per_kv <= tiles[-1],
        "query heads of one K/V head",
        expected=f"at most {tiles[-1]}",
        found=heads_per_kv,
        hint="No tile holds a single row of more.",
    )
    return next((tile for tile in tiles if tile >= query_rows * heads_per_kv), tiles[-1])


def fixed_tile(heads_per_kv: int, tiles: tuple[int, ...] = TILES) -> int:
    """The tile of all rows with splits of a fixed length."""
    return max(min(FIXED_TILE, tiles[-1]), tile_rows(1, heads_per_kv, tiles))


def fixed_tiles(heads_per_kv: int, head_dim: int) -> tuple[int, ...]:
    """The tiles that `fixed_tile` may give, whatever pages hold."""
    if head_dim <= WIDE_HEAD_DIM:
        return (fixed_tile(heads_per_kv),)
    return tuple(tile for tile in TILES if heads_per_kv <= tile <= WIDE_MAX_TILE)


def tiles_of(
    *, head_dim: int, dtype: torch.dtype, page_dtype: torch.dtype, tiles: tuple[int, ...] = TILES
) -> tuple[int, ...]:
    """`tiles`, or their replacements, ascending: FP8 to float16 takes too many instructions for few rows."""
    is_fp8 = page_dtype.itemsize == 1 and dtype.itemsize == 2
    if head_dim <= WIDE_HEAD_DIM:
        smallest, largest = FP8_MIN_TILE if is_fp8 else TILES[0], TILES[-1]
        if dtype == torch.float32:
            largest = _MAX_FLOAT32_TILE if head_dim <= 128 else _FLOAT32_TILE_ABOVE_128
    else:
        smallest, largest = TILES[0], _WIDE_MAX_FP8_TILE if is_fp8 else WIDE_MAX_TILE
        if dtype == torch.float32:
            largest = _WIDE_MAX_FLOAT32_TILE
    return tuple(sorted({min(max(smallest, tile), largest) for tile in tiles}))


def num_parts(*, tile: int, head_dim: int) -> int:
    """Programs that share a tile, each with a part of V."""
    return 2 if head_dim > WIDE_HEAD_DIM and tile > TILES[0] else 1


def has_full_loop(*, tile: int, is_split_fixed: bool = False) -> bool:
    """True if blocks without masks precede those at a window's start; not if the order of sums is fixed."""
    return tile >= MIN_FULL_LOOP_TILE and not is_split_fixed


def attention_options(*, tile: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Warps and software pipeline stages of `attention_kernel`: its sums fit in registers."""
    is_wide = tile == 128 or (tile == 64 and head_dim > 128)
    return {"num_warps": 8 if is_wide else 4, "num_stages": 2 if dtype == torch.float32 else 3}
