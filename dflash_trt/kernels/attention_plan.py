"""Attention on the host: a layer's options, tiles, the partition of a launch, and one kernel that writes its plan.

A tile's sums are float32 [TILE, DIM / parts] in registers. Above `WIDE_HEAD_DIM` two programs share a tile, each of
which has all scores and half of V; what is compiled for it spills no register on SM90, SM100 and SM103. Nothing here
reads a tensor's content: lengths stay on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_trt.kernels.attention_partition import PLAN_WORDS, attention_plan_kernel
from dflash_trt.kernels.launch_rules import (
    ANY_ROWS,
    FP8_MIN_TILE,
    NO_CHUNK,
    NO_WINDOW,
    WIDE_HEAD_DIM,
    max_lag,
    max_lead,
    row_tiles,
)
from dflash_trt.kernels.launching import check, check_tensor, next_power_of_2


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention.

    `window`, `chunk`, `is_window_anchored` and `first_key` as in `core.model.gqa.AttentionMask`. `score_scale` defaults
    to D ** -0.5. `softcap` c turns a score s into c * tanh(s / c). `sinks` float32 [heads] are logits in the softmax's
    denominator that have no value. The other scales are for FP8 pages.

    `split_length`: keys of a split, instead of as many splits as fill the GPU. All rows then use tiles of one size, and
    a row's result depends only on its own position and keys, to the last bit.
    """

    window: int | None = None
    chunk: int | None = None
    is_causal: bool = True
    is_window_anchored: bool = False
    first_key: int = 0
    score_scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    split_length: int | None = None

    @property
    def max_lag(self) -> int:
        window, chunk = self.window or NO_WINDOW, self.chunk or NO_CHUNK
        return max_lag(window=window, chunk=chunk, is_window_anchored=self.is_window_anchored)

    @property
    def max_lead(self) -> int:
        is_anchored = self.is_window_anchored
        return max_lead(lag=self.max_lag, is_causal=self.is_causal, is_window_anchored=is_anchored)

    @property
    def window_step(self) -> int:
        return 0 if self.is_window_anchored else 1


PLAN_WARPS = 1  # per program, which writes one item


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTensors:
    """Requests of a step: int32 `token_offsets` [R + 1], `context_lens` [R] and `page_table` [R, P]."""

    token_offsets: Tensor
    context_lens: Tensor
    page_table: Tensor

    def check(self, num_requests: int, *names: str) -> None:
        """Raise ValueError unless the tensors of these names are of `num_requests` requests."""
        shapes: dict[str, list[int | None]] = {
            "token_offsets": [num_requests + 1],
            "context_lens": [num_requests],
            "page_table": [num_requests, None],
        }
        for name in names:
            check_tensor(name, getattr(self, name), dtype=torch.int32, shape=shapes[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """All that a plan depends on, but for the lengths. Layers with equal partitions share one plan.

    Only requests with min_rows to max_rows rows are served. `split_blocks` 0: as many splits as fill `num_slots`
    programs per K/V head.
    """

    num_rows: int
    num_requests: int
    request_capacity: int
    has_block: bool
    tile: int
    heads_per_kv: int
    key_block: int
    max_lag: int
    window_step: int
    num_slots: int
    chunk: int = 0  # none
    split_blocks: int = 0
    min_rows: int = 1
    max_rows: int = ANY_ROWS

    @property
    def rows_per_tile(self) -> int:
        return self.tile // self.heads_per_kv

    @property
    def block_rows(self) -> int:
        return self.num_rows // self.num_requests

    @property
    def tile_capacity(self) -> int:
        return row_tiles(
            num_rows=self.num_rows,
            num_requests=self.num_requests,
            rows_per_tile=self.rows_per_tile,
            min_rows=self.min_rows,
        )

    @property
    def num_items(self) -> int:
        """Items of a plan: the first splits of all tiles, then the other splits."""
        return self.tile_capacity + self.num_slots

    @property
    def constants(self) -> dict[str, int | bool]:
        return {
            "TILE": self.tile,
            "KEY_BLOCK": self.key_block,
            "REQUESTS": self.request_capacity,
            "HAS_BLOCK": self.has_block,
            "CHUNK": self.chunk,
        }


class AttentionPlans:
    """Plans of one step's rows, each written when the first layer asks, and read by all layers like it.

    The lengths must not change meanwhile: a step, and a graph that is captured, begin with new ones.
    """

    def __init__(self) -> None:
        self._plans: dict[Partition, Tensor] = {}

    def of(self, requests: RequestTensors, partition: Partition) -> Tensor:
        """int32 [items, PLAN_WORDS], see `attention_partition.plan_item`."""
        plan = self._plans.get(partition)
        if plan is None:
            plan = self._plans[partition] = write_plan(requests, partition)
        return plan


def write_plan(requests: RequestTensors, partition: Partition) -> Tensor:
    device = requests.context_lens.device
    plan = torch.empty(partition.num_items, PLAN_WORDS.value, dtype=torch.int32, device=device)
    attention_plan_kernel[(partition.num_items,)](
        plan,
        requests.token_offsets,
        requests.context_lens,
        partition.num_requests,
        partition.block_rows,
        partition.rows_per_tile,
        partition.max_lag,
        partition.window_step,
        partition.min_rows,
        partition.max_rows,
        partition.num_slots,
        partition.split_blocks,
        **partition.constants,
        num_warps=PLAN_WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return plan


def with_fixed_splits(partition: Partition, split_length: int, *, num_keys: int) -> Partition:
    """The partition with splits of `split_length` keys, and slots for requests of up to `num_keys` keys."""
    return replace(
        partition,
        num_slots=fixed_splits(num_keys, split_length) * partition.tile_capacity,
        split_blocks=split_blocks(split_length, partition.key_block),
    )


def fixed_splits(num_keys: int, split_length: int) -> int:
    """The most splits of a tile: a window may touch one more."""
    return num_keys // split_length + 2


def split_blocks(split_length: int, key_block: int) -> int:
    """Key blocks of a split of a fixed length."""
    check(
        split_length > 0 and split_length % key_block == 0,
        "split_length",
        expected=f"a multiple of {key_block}",
        found=split_length,
        hint="Splits are made of whole blocks of keys.",
    )
    return split_length // key_block


def key_block(*, head_dim: int, dtype: torch.dtype) -> int:
    dim = max(16, next_power_of_2(head_dim))
    return max(16, min(128, 16384 // (dim * dtype.itemsize)))


def page_run(*, page_size: int, key_block: int) -> int:
    """Neighbouring keys whose page is looked up once."""
    return min(page_size, key_block)


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
