"""The work partition alone: whatever the lengths, every tile and split is taken once, within the bounds of the grid."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from dflash_trt.kernels.attention_partition import locate, request_lengths, splits_of, tiles_and_blocks
from dflash_trt.kernels.launch_rules import ANY_DISTANCE, ANY_ROWS

TILE, KEY_BLOCK, REQUESTS = 16, 16, 16


@triton.jit
def record_items(
    records,  # int32 [items, 5]
    token_offsets,
    context_lens,
    num_requests,
    block_rows,
    rows_per_tile,
    max_lag,
    min_rows,
    max_rows,
    work_slots,
    TILE: tl.constexpr,  # noqa: N803
    KEY_BLOCK: tl.constexpr,  # noqa: N803
    REQUESTS: tl.constexpr,  # noqa: N803
    HAS_BLOCK: tl.constexpr,  # noqa: N803
    COUNTS_TILES: tl.constexpr,  # noqa: N803
):
    item = tl.program_id(0)
    request, local, first_slot, blocks_per_split = locate(
        item,
        token_offsets,
        context_lens,
        num_requests,
        block_rows,
        rows_per_tile,
        max_lag,
        min_rows,
        max_rows,
        work_slots,
        TILE,
        KEY_BLOCK,
        REQUESTS,
        HAS_BLOCK,
        COUNTS_TILES,
    )
    rows, context = request_lengths(token_offsets, context_lens, request, request < num_requests, block_rows, HAS_BLOCK)
    tiles, blocks = tiles_and_blocks(rows, context, rows_per_tile, max_lag, min_rows, max_rows, KEY_BLOCK, HAS_BLOCK)
    record = records + item * 5
    tl.store(record, request)
    tl.store(record + 1, local)
    tl.store(record + 2, first_slot)
    tl.store(record + 3, tiles)
    tl.store(record + 4, splits_of(blocks, blocks_per_split))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    rows_per_tile: int = 4
    work_slots: int = 4
    window: int | None = None
    min_rows: int = 1
    max_rows: int = ANY_ROWS
    has_block: bool = False

    @property
    def row_capacity(self) -> int:
        return sum(self.rows) // self.rows_per_tile + len(self.rows)


CASES = {
    "even": Lengths(rows=(4, 4, 4), contexts=(64, 64, 64)),
    "one long among short ones": Lengths(rows=(1, 4, 1), contexts=(3, 2000, 40), work_slots=12),
    "a request without rows": Lengths(rows=(4, 0, 3), contexts=(640, 500, 0)),
    "a prefill chunk": Lengths(rows=(33, 2), contexts=(500, 300), work_slots=20),
    "window": Lengths(rows=(33, 2), contexts=(500, 300), work_slots=20, window=100),
    "short requests only": Lengths(rows=(33, 2, 3), contexts=(500, 300, 9), max_rows=4, work_slots=20),
    "long requests only": Lengths(rows=(33, 2, 3), contexts=(500, 300, 9), min_rows=5, work_slots=20),
    "draft blocks": Lengths(rows=(5, 5, 5), contexts=(0, 900, 20), has_block=True, work_slots=9),
    "more tiles than slots": Lengths(rows=(9, 9, 9), contexts=(100, 200, 300), work_slots=2),
}


def record(lengths: Lengths, device: torch.device, *, counts_tiles: bool) -> list[list[int]]:
    """[request, item within it, first partial slot, tiles, splits] of every program that has work."""
    num_programs = lengths.row_capacity + (0 if counts_tiles else lengths.work_slots)
    records = torch.full((num_programs, 5), -1, dtype=torch.int32, device=device)
    record_items[(num_programs,)](
        records,
        torch.tensor((0, *lengths.rows), device=device).cumsum(0).int(),
        torch.tensor(lengths.contexts, dtype=torch.int32, device=device),
        len(lengths.rows),
        lengths.rows[0],
        lengths.rows_per_tile,
        ANY_DISTANCE if lengths.window is None else lengths.window - 1,
        lengths.min_rows,
        lengths.max_rows,
        lengths.work_slots,
        TILE=TILE,
        KEY_BLOCK=KEY_BLOCK,
        REQUESTS=REQUESTS,
        HAS_BLOCK=lengths.has_block,
        COUNTS_TILES=counts_tiles,
    )
    return [row for row in records.tolist() if row[0] < len(lengths.rows)]


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_every_tile_and_split_is_taken_once_within_the_bounds(lengths: Lengths, device: torch.device) -> None:
    items = record(lengths, device, counts_tiles=False)
    served = {r for r, n in enumerate(lengths.rows) if lengths.min_rows <= n <= lengths.max_rows}
    assert {request for request, *_ in items} == served
    slots: list[int] = []
    for request in served:
        mine = [item for item in items if item[0] == request]
        _, _, first_slot, tiles, splits = mine[0]
        assert tiles == -(-lengths.rows[request] // lengths.rows_per_tile)
        assert sorted(local for _, local, *_ in mine) == list(range(tiles * splits))
        slots += [first_slot + local for _, local, *_ in mine] if splits > 1 else []
    assert max(Counter(slots).values(), default=1) == 1, "two items share a partial result"
    assert max(slots, default=0) < 2 * lengths.work_slots


def test_long_requests_are_split_and_short_ones_are_not(device: torch.device) -> None:
    items = record(CASES["one long among short ones"], device, counts_tiles=False)
    splits = {request: splits for request, _, _, _, splits in items}
    assert splits[0] == splits[2] == 1
    assert splits[1] > 8


@pytest.mark.parametrize("name", ["a prefill chunk", "short requests only"])
def test_the_reduction_finds_the_same_tiles(device: torch.device, name: str) -> None:
    items = record(CASES[name], device, counts_tiles=False)
    tiles = record(CASES[name], device, counts_tiles=True)
    by_request = {request: (first_slot, tiles, splits) for request, _, first_slot, tiles, splits in items}
    assert {request: (first_slot, tiles, splits) for request, _, first_slot, tiles, splits in tiles} == by_request
    assert Counter(request for request, *_ in tiles) == {r: n for r, (_, n, _) in by_request.items()}
