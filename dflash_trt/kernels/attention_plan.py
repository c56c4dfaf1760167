"""Attention plans on the host: the partition of a launch, and one kernel that writes its plan.

Nothing here reads a tensor's content: lengths stay on the device.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_trt.kernels.attention_partition import PLAN_WORDS, attention_plan_kernel
from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.launch_rules import ANY_ROWS, row_tiles
from dflash_trt.kernels.tensor_checks import check

PLAN_WARPS = 1  # per program, which writes one item


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTensors:
    """Requests of a step: int32 `token_offsets` [R + 1], `context_lens` [R] and `page_table` [R, P]."""

    token_offsets: Tensor
    context_lens: Tensor
    page_table: Tensor


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
