"""Sizes of a launch of latent attention, and of its memory. Compiles nothing."""

from dataclasses import dataclass
from typing import Final

from dflash_trt.kernels.launch_rules import latent_slots, num_partials, num_stats

MAX_LATENT_DIM: Final = 512  # sums of a tile's rows fill the registers of a multiprocessor
MAX_ROPE_DIM: Final = 64
TILE: Final = 64  # rows: the fewest that the tensor cores of Hopper and Blackwell read from shared memory
FP8_TILE: Final = 32  # rows; with 64 the conversion of FP8 to float16 spills registers
FLOAT32_TILE: Final = 16
LATENT_TILES: Final = (TILE, FP8_TILE, FLOAT32_TILE)  # for pages of every dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Sizes of one layer on one rank."""

    num_heads: int
    latent_dim: int
    rope_dim: int

    @property
    def row_size(self) -> int:
        return self.latent_dim + self.rope_dim

    def group_heads(self, tile: int) -> int:
        """Heads of a tile: all of them, or as many of one row as divide them."""
        return max(size for size in range(1, min(self.num_heads, tile) + 1) if self.num_heads % size == 0)

    def groups(self, tile: int) -> int:
        return self.num_heads // self.group_heads(tile)

    def query_elements(self, num_rows: int) -> int:
        """Elements of all heads of `num_rows` rows, and of a tile that begins at the last: it is read, too."""
        return (num_rows * self.num_heads + TILE) * self.row_size

    def attended_elements(self, num_rows: int) -> int:
        return num_rows * self.num_heads * self.latent_dim

    def rows_per_tile(self, tile: int) -> int:
        """A tile has all heads of its rows, or some of one row."""
        return tile // self.num_heads if self.groups(tile) == 1 else 1

    def workspace_elements(self, tile: int, *, num_slots: int) -> int:
        """float32, of partial results."""
        sizes = {"tile": tile, "kv_heads": self.groups(tile), "num_slots": num_slots}
        return num_partials(head_dim=self.latent_dim, **sizes) + num_stats(**sizes)


def largest_workspace(shape: LatentShape, *, num_multiprocessors: int) -> int:
    """float32 elements, enough for pages of every dtype."""
    return max(
        shape.workspace_elements(tile, num_slots=num_work_slots(shape.groups(tile), num_multiprocessors))
        for tile in LATENT_TILES
    )


def num_work_slots(groups: int, num_multiprocessors: int) -> int:
    """Programs of a group that run at once."""
    return latent_slots(groups=groups, num_multiprocessors=num_multiprocessors)
