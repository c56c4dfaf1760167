"""Attention in which a row's bits depend only on its own position and keys: the sizes it needs.

Splits have a fixed length, so that a tile has partial results for all its keys. Steps with more rows than memory for
those run in pieces, as if the prompts came in smaller chunks, which changes no bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.attention_launch import workspace_size
from dflash_trt.kernels.attention_plan import AttentionPlans, RequestTensors, fixed_splits, fixed_tiles
from dflash_trt.kernels.latent_rules import LATENT_TILES, LatentShape
from dflash_trt.kernels.launch_rules import FIXED_SPLITS, MAX_GRID_Y, fixed_split_length

MIN_PIECE_ROWS: Final = 512  # enough work for a GPU in each launch
# Tiles of a launch, each with an item for itself and for all of its splits: a grid has at most 65,535 programs along y.
_MAX_TILES: Final = MAX_GRID_Y // (1 + FIXED_SPLITS + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows of a step that are attended together, and the plans that its layers share."""

    rows: slice
    requests: RequestTensors
    plans: AttentionPlans = field(default_factory=AttentionPlans)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSplits:
    """Sizes of an engine, never of a step."""

    split_length: int  # keys
    piece_rows: int
    num_requests: int
    num_keys: int  # per request

    @classmethod
    def of(cls, *, max_requests: int, max_rows: int, max_keys: int) -> "FixedSplits":
        """`max_rows` counts verify blocks, which are one piece unless there are too many for a launch."""
        return cls(
            split_length=fixed_split_length(max_keys=max_keys),
            piece_rows=max(MIN_PIECE_ROWS, min(max_rows, _MAX_TILES - max_requests)),
            num_requests=max_requests,
            num_keys=max_keys,
        )

    def pieces(self, requests: RequestTensors, num_rows: int) -> Iterator[Piece]:
        """All rows of a step, in order. Nothing here reads a tensor's content."""
        if num_rows <= self.piece_rows:
            yield Piece(rows=slice(num_rows), requests=requests)
            return
        for first in range(0, num_rows, self.piece_rows):
            last = min(first + self.piece_rows, num_rows)
            yield Piece(rows=slice(first, last), requests=_between(requests, first, last))

    def allocate_workspace(self, *, heads_per_kv: int, kv_heads: int, head_dim: int, device: torch.device) -> Tensor:
        """float32, enough for every piece of layers with these heads."""

        def num_elements(tile: int) -> int:
            num_slots = self._num_slots(tile // heads_per_kv)
            size = workspace_size(tile=tile, kv_heads=kv_heads, head_dim=head_dim, num_slots=num_slots)
            return size.num_elements

        most = max(map(num_elements, fixed_tiles(heads_per_kv, head_dim)))
        return torch.empty(most, dtype=torch.float32, device=device)

    def allocate_latent_workspace(self, shape: LatentShape, device: torch.device) -> Tensor:
        """float32, enough for every piece of a layer with latents of this shape."""
        sizes = (
            shape.workspace_elements(tile, num_slots=self._num_slots(shape.rows_per_tile(tile)))
            for tile in LATENT_TILES
        )
        return torch.empty(max(sizes), dtype=torch.float32, device=device)

    def _num_slots(self, rows_per_tile: int) -> int:
        num_tiles = self.piece_rows // rows_per_tile + self.num_requests
        return num_tiles * fixed_splits(self.num_keys, self.split_length)


def _between(requests: RequestTensors, first: int, last: int) -> RequestTensors:
    """The step's requests with only the rows first to last - 1, as if earlier ones were stored already."""
    offsets = requests.token_offsets
    return RequestTensors(
        token_offsets=offsets.clamp(first, last) - first,
        context_lens=requests.context_lens + (first - offsets[:-1]).clamp(min=0),
        page_table=requests.page_table,
    )
