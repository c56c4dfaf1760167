"""The work partition alone: whatever the lengths, every tile and split is taken once, within the bounds of the grid."""

from dataclasses import dataclass, fields

import pytest
import torch

from dflash_trt.kernels.attention_plan import Partition, RequestTensors, write_plan
from dflash_trt.kernels.launch_rules import ANY_DISTANCE, ANY_ROWS
from dflash_trt.kernels.launching import request_capacity

TILE, KEY_BLOCK = 16, 16


@dataclass(frozen=True, kw_only=True)
class Lengths:
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    rows_per_tile: int = 4
    work_slots: int = 4
    window: int | None = None
    chunk: int = 0
    min_rows: int = 1
    max_rows: int = ANY_ROWS
    has_block: bool = False

    split_blocks: int = 0

    def partition(self) -> Partition:
        return Partition(
            num_rows=sum(self.rows),
            num_requests=len(self.rows),
            request_capacity=request_capacity(len(self.rows)),
            has_block=self.has_block,
            tile=TILE,
            heads_per_kv=TILE // self.rows_per_tile,
            key_block=KEY_BLOCK,
            max_lag=(ANY_DISTANCE if self.window is None else self.window - 1) if self.chunk == 0 else self.chunk - 1,
            chunk=self.chunk,
            window_step=1,
            num_slots=self.work_slots,
            split_blocks=self.split_blocks,
            min_rows=self.min_rows,
            max_rows=self.max_rows,
        )

    def keys_of(self, request: int, first_row: int, num_rows: int) -> set[int]:
        """Stored keys that a tile's rows see, and the others of their blocks before them."""
        context = self.contexts[request]
        first = 0 if self.window is None else max(context + first_row - self.window + 1, 0)
        if self.chunk:
            first = (context + first_row) // self.chunk * self.chunk
        return set(range(first // KEY_BLOCK * KEY_BLOCK, context if self.has_block else context + first_row + num_rows))


@dataclass(frozen=True, kw_only=True)
class Item:
    """`attention_partition.plan_item`'s result."""

    index: int
    request: int
    token: int
    num_rows: int
    position: int
    key_begin: int
    key_end: int
    slot: int
    splits: int

    @property
    def split(self) -> int:
        return self.splits >> 16

    @property
    def num_splits(self) -> int:
        return self.splits & 65535


CASES = {
    "even": Lengths(rows=(4, 4, 4), contexts=(64, 64, 64)),
    "one long among short ones": Lengths(rows=(1, 4, 1), contexts=(3, 2000, 40), work_slots=12),
    "a request without rows": Lengths(rows=(4, 0, 3), contexts=(640, 500, 0)),
    "a prefill chunk": Lengths(rows=(33, 2), contexts=(500, 300), work_slots=20),
    "window": Lengths(rows=(33, 2), contexts=(500, 300), work_slots=20, window=100),
    "chunks": Lengths(rows=(33, 2, 4, 1), contexts=(80, 300, 95, 192), work_slots=20, chunk=96),
    "chunks of less than a block of keys": Lengths(rows=(9, 3), contexts=(500, 30), work_slots=20, chunk=10),
    "fixed length, chunks": Lengths(rows=(9, 4, 1), contexts=(300, 92, 0), split_blocks=3, chunk=96, work_slots=64),
    "short requests only": Lengths(rows=(33, 2, 3), contexts=(500, 300, 9), max_rows=4, work_slots=20),
    "as many long requests as there may be": Lengths(rows=(5, 5, 1, 1, 5, 1, 1), contexts=(9,) * 7, min_rows=5),
    "long requests only": Lengths(rows=(33, 2, 3), contexts=(500, 300, 9), min_rows=5, work_slots=20),
    "draft blocks": Lengths(rows=(5, 5, 5), contexts=(0, 900, 20), has_block=True, work_slots=9),
    "fixed length": Lengths(rows=(9, 4, 1), contexts=(300, 40, 0), split_blocks=3, work_slots=64),
    "fixed length under a window": Lengths(
        rows=(9, 4, 1), contexts=(300, 40, 0), split_blocks=3, window=100, work_slots=64
    ),
    "more tiles than slots": Lengths(rows=(9, 9, 9), contexts=(100, 200, 300), work_slots=2),
}


def planned(lengths: Lengths, device: torch.device) -> list[Item]:
    requests = RequestTensors(
        token_offsets=torch.tensor((0, *lengths.rows), device=device).cumsum(0).int(),
        context_lens=torch.tensor(lengths.contexts, dtype=torch.int32, device=device),
        page_table=torch.zeros(len(lengths.rows), 1, dtype=torch.int32, device=device),
    )
    names = [field.name for field in fields(Item)][1:]
    plan = write_plan(requests, lengths.partition()).tolist()
    items = [Item(index=index, **dict(zip(names, words, strict=True))) for index, words in enumerate(plan)]
    return [item for item in items if item.num_rows > 0]


def tiles_of(lengths: Lengths) -> set[tuple[int, int, int]]:
    """(request, first row, rows) of every tile."""
    return {
        (request, first, min(lengths.rows_per_tile, rows - first))
        for request, rows in enumerate(lengths.rows)
        if lengths.min_rows <= rows <= lengths.max_rows
        for first in range(0, rows, lengths.rows_per_tile)
    }


@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_every_key_of_every_tile_is_taken_once_within_the_bounds(lengths: Lengths, device: torch.device) -> None:
    items = planned(lengths, device)
    tiles: dict[tuple[int, int, int], list[Item]] = {}
    for item in items:
        first_row = item.position - lengths.contexts[item.request]
        assert (item.index < lengths.partition().tile_capacity) == (item.split == 0), "the reduction looks there"
        assert item.token == sum(lengths.rows[: item.request]) + first_row
        tiles.setdefault((item.request, first_row, item.num_rows), []).append(item)
    assert set(tiles) == tiles_of(lengths)
    for tile, mine in tiles.items():
        assert sorted(item.split for item in mine) == list(range(mine[0].num_splits))
        assert [item.slot - item.split for item in mine] == [mine[0].slot - mine[0].split] * len(mine)
        keys = [key for item in mine for key in range(item.key_begin, item.key_end)]
        assert len(keys) == len(set(keys)), "two splits share a key"
        assert set(keys) == lengths.keys_of(*tile)
    slots = [item.slot for item in items if item.num_splits > 1]
    assert len(slots) == len(set(slots)), "two items share a partial result"
    assert max(slots, default=0) < lengths.work_slots


def test_long_requests_are_split_and_short_ones_are_not(device: torch.device) -> None:
    items = planned(CASES["one long among short ones"], device)
    splits = {item.request: item.num_splits for item in items}
    assert splits[0] == splits[2] == 1
    assert splits[1] > 8


@pytest.mark.parametrize(("num_requests", "num_items"), [(1, 32), (16, 32), (17, 17)])
def test_equal_requests_are_split_for_one_wave_and_not_where_they_fill_half_of_it(
    num_requests: int, num_items: int, device: torch.device
) -> None:
    """132 multiprocessors, 8 K/V heads: 33 programs of each head at once."""
    lengths = Lengths(rows=(4,) * num_requests, contexts=(8188,) * num_requests, work_slots=33)
    assert len(planned(lengths, device)) == num_items


@pytest.mark.parametrize("window", [None, 100])
def test_splits_of_a_fixed_length_begin_at_its_multiples(window: int | None, device: torch.device) -> None:
    lengths = Lengths(rows=(9, 4), contexts=(500, 30), window=window, split_blocks=4, work_slots=64)
    length = 4 * KEY_BLOCK
    for item in planned(lengths, device):
        begins_at_window = window is not None and item.split == 0
        assert item.key_begin % length == 0 or begins_at_window or item.key_begin >= item.key_end
        assert item.key_end - item.key_begin <= length
    alone = Lengths(rows=(4,), contexts=(30,), window=window, split_blocks=4, work_slots=64)
    [beside], [single] = (
        [(item.key_begin, item.key_end) for item in planned(x, device) if item.request == r and item.split == 0]
        for x, r in ((lengths, 1), (alone, 0))
    )
    assert beside == single
