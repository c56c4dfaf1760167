"""Launching the attention kernels: which tile, which grid, how much workspace.

The plugin library's launcher does the same from the same numbers: it compiles `launch_rules.py` and the grid of a
variant (`attention_variants.py`). Nothing here reads a tensor's content, so a launch can be captured in a CUDA graph.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from dflash_trt.kernels.attention import attention_kernel
from dflash_trt.kernels.attention_plan import (
    TILES,
    WIDE_MAX_TILE,
    AttentionPlans,
    Partition,
    RequestTensors,
    attention_options,
    fixed_tile,
    has_full_loop,
    key_block,
    num_parts,
    page_run,
    tile_rows,
    tiles_of,
    with_fixed_splits,
)
from dflash_trt.kernels.attention_plan import AttentionOptions as AttentionOptions
from dflash_trt.kernels.attention_reduction import attention_codes_kernel, attention_reduction_kernel
from dflash_trt.kernels.launch_rules import (
    ANY_ROWS,
    NO_CHUNK,
    WIDE_HEAD_DIM,
    heads_reciprocal,
    is_verify_step,
    most_verify_rows,
    num_partials,
    num_stats,
    work_slots,
)
from dflash_trt.kernels.launching import FLOATS, check, check_pages, check_tensor, next_power_of_2, request_capacity
from dflash_trt.kernels.row_codes_launch import RowCodes

REDUCTION_ROWS = 8
REDUCTION_STAGES = 4
INTERPRETER_MULTIPROCESSORS = 3  # few programs, which the interpreter runs one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceSize:
    """float32 elements of one launch. One workspace serves all launches of a stream, one after another."""

    num_partials: int
    num_stats: int

    @property
    def num_elements(self) -> int:
        return self.num_partials + self.num_stats

    def parts_of(self, workspace: Tensor, *, hint: str) -> tuple[Tensor, Tensor]:
        """Partials and stats. Raises ValueError: it is too small."""
        check_tensor("workspace", workspace, dtype=torch.float32, shape=[None])
        is_enough, expected = len(workspace) >= self.num_elements, f"at least {self.num_elements} elements"
        check(is_enough, "workspace", expected=expected, found=len(workspace), hint=hint)
        return workspace[: self.num_partials], workspace[self.num_partials : self.num_elements]


def workspace_size(*, tile: int, kv_heads: int, head_dim: int, num_slots: int) -> WorkspaceSize:
    return WorkspaceSize(
        num_partials=num_partials(tile=tile, kv_heads=kv_heads, head_dim=head_dim, num_slots=num_slots),
        num_stats=num_stats(tile=tile, kv_heads=kv_heads, num_slots=num_slots),
    )


def attention_constants(*, head_dim: int) -> dict[str, int]:
    """Constants of the kernels that read K/V, but for the partition's."""
    return {"HEAD_DIM": head_dim, "DIM": max(16, next_power_of_2(head_dim))}


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def allocate_workspace(*, kv_heads: int, head_dim: int, device: torch.device) -> Tensor:
    """float32, enough for every launch of this geometry, whatever the step's shape."""
    sizes = (
        workspace_size(
            tile=tile,
            kv_heads=kv_heads,
            head_dim=head_dim,
            num_slots=_num_slots(kv_heads=kv_heads, tile=tile, head_dim=head_dim, device=device),
        )
        for tile in TILES
        if head_dim <= WIDE_HEAD_DIM or tile <= WIDE_MAX_TILE
    )
    return torch.empty(max(size.num_elements for size in sizes), dtype=torch.float32, device=device)


def _num_slots(*, kv_heads: int, tile: int, head_dim: int, device: torch.device) -> int:
    """One wave of the GPU: the parts of a tile run in parallel."""
    num_programs = kv_heads * num_parts(tile=tile, head_dim=head_dim)
    return work_slots(kv_heads=num_programs, num_multiprocessors=num_multiprocessors(device))


def attend_pages(
    q: Tensor,  # F [T, heads, D]
    pages: Tensor,  # F or float8_e4m3fn [pages, 2, page_size, kv_heads, D]
    requests: RequestTensors,  # context_lens: tokens before this step; the step's K/V are in the pages already
    options: AttentionOptions,
    *,
    workspace: Tensor,  # see `allocate_workspace`
    num_verify_rows: int,  # K + 1: what most requests have; the others are prefill chunks
    plans: AttentionPlans | None = None,  # the step's plans; None makes plans for this call
    attended: Tensor | None = None,  # out, F [T, heads, D]
    codes: RowCodes | None = None,  # out, FP8; `attended` is then left unfinished
) -> Tensor:
    """Causal attention of the step's tokens over their requests' pages, F [T, heads, D].

    A step with more rows than verification could have is launched twice: with small tiles for the short requests and
    with large ones for the prefill chunks, each skipping the other's requests on the device.
    """
    num_requests = len(requests.context_lens)
    check(num_requests > 0, "requests", expected="at least one", found=0, hint="Launch nothing for an empty step.")
    check(options.is_causal, "is_causal", expected="True", found=False, hint="Only a draft block looks ahead.")
    check(
        not options.is_window_anchored,
        "is_window_anchored",
        expected="False",
        found=True,
        hint="Only a draft block has an anchor.",
    )
    requests.check(num_requests, "token_offsets")
    attended = torch.empty_like(q) if attended is None else attended
    launch = _Launch(q, pages, requests, options, workspace, plans or AttentionPlans(), attended, codes)
    sizes = {"num_rows": len(q), "num_requests": num_requests, "num_verify_rows": num_verify_rows}
    if is_verify_step(**sizes) or options.split_length is not None:
        launch.run(query_rows=most_verify_rows(**sizes), block=None)
    else:
        if num_requests > 1:
            launch.run(query_rows=num_verify_rows, block=None, max_rows=num_verify_rows)
        launch.run(query_rows=len(q), block=None, min_rows=num_verify_rows + 1)
    return attended


def attend_draft(
    q: Tensor,  # F [R * S, heads, D]
    block: tuple[Tensor, Tensor],  # k, v of the block slots, F [R * S, kv_heads, D]; rows may be further apart
    pages: Tensor,
    requests: RequestTensors,  # context_lens: the next context lengths; token_offsets are not read
    options: AttentionOptions,
    *,
    workspace: Tensor,
    plans: AttentionPlans | None = None,
    attended: Tensor | None = None,
    codes: RowCodes | None = None,  # as in `attend_pages`
) -> Tensor:
    """Attention of draft blocks over their requests' stored context and themselves, F [R * S, heads, D]."""
    num_requests = len(requests.context_lens)
    check(options.chunk is None, "chunk", expected="None", found=options.chunk, hint="Draft blocks have no chunks.")
    check(
        num_requests > 0 and len(q) % num_requests == 0,
        "q",
        expected=f"the same number of rows for each of {num_requests} requests",
        found=f"{len(q)} rows",
        hint="Every request has S block slots.",
    )
    for name, tensor in zip(("block_k", "block_v"), block, strict=True):
        shape = [len(q), pages.shape[3], pages.shape[4]]
        check_tensor(name, tensor, dtype=q.dtype, shape=shape, row_stride_is_free=True)
    attended = torch.empty_like(q) if attended is None else attended
    launch = _Launch(q, pages, requests, options, workspace, plans or AttentionPlans(), attended, codes)
    launch.run(query_rows=len(q) // num_requests, block=block)
    return attended


@dataclass(frozen=True, slots=True)
class _Launch:
    """The checked arguments of one call, which may launch more than once."""

    q: Tensor
    pages: Tensor
    requests: RequestTensors
    options: AttentionOptions
    workspace: Tensor
    plans: AttentionPlans
    attended: Tensor
    codes: RowCodes | None

    def __post_init__(self) -> None:
        """Raises ValueError for arguments that the kernels would misread."""
        q, pages, requests, options = self.q, self.pages, self.requests, self.options
        num_requests = len(requests.context_lens)
        check_tensor("q", q, dtype=FLOATS, shape=[None, None, None])
        heads, head_dim = q.shape[1:]
        check_pages(pages, dtype=q.dtype, head_dim=head_dim, scales=(options.k_scale, options.v_scale))
        check_tensor("attended", self.attended, dtype=q.dtype, shape=q.shape)
        requests.check(num_requests, "context_lens", "page_table")
        check(
            heads % pages.shape[3] == 0,
            "q",
            expected=f"a multiple of {pages.shape[3]} heads",
            found=heads,
            hint="Query heads share K/V heads evenly.",
        )
        if options.sinks is not None:
            check_tensor("sinks", options.sinks, dtype=torch.float32, shape=[heads])
        if self.codes is not None:
            check_tensor("codes", self.codes.values, dtype=torch.float8_e4m3fn, shape=[len(q), heads * head_dim])

    def run(
        self, *, query_rows: int, block: tuple[Tensor, Tensor] | None, min_rows: int = 1, max_rows: int = ANY_ROWS
    ) -> None:
        """Both kernels with the tile for `query_rows`, over the requests with min_rows to max_rows rows."""
        partition = replace(self._partition(query_rows, block is not None), min_rows=min_rows, max_rows=max_rows)
        plan = self.plans.of(self.requests, partition)
        partials, stats = self._partials(partition)
        self._attend(partition, plan, (self.q, self.q) if block is None else block, partials, stats)
        finish = self._reduce if self.codes is None else self._quantize
        finish(partition, plan, partials, stats)

    def _partition(self, query_rows: int, has_block: bool) -> Partition:
        options, kv_heads, head_dim = self.options, *self.pages.shape[3:]
        num_requests, heads_per_kv = len(self.requests.context_lens), self.q.shape[1] // kv_heads
        tile = self._tile(query_rows, heads_per_kv)
        shared = Partition(
            num_rows=len(self.q),
            num_requests=num_requests,
            request_capacity=request_capacity(num_requests),
            has_block=has_block,
            tile=tile,
            heads_per_kv=heads_per_kv,
            key_block=key_block(head_dim=head_dim, dtype=self.q.dtype),
            max_lag=options.max_lag,
            window_step=options.window_step,
            chunk=options.chunk or NO_CHUNK,
            num_slots=_num_slots(kv_heads=kv_heads, tile=tile, head_dim=head_dim, device=self.q.device),
        )
        if options.split_length is None:
            return shared
        num_keys = self.requests.page_table.shape[1] * self.pages.shape[2]
        return with_fixed_splits(shared, options.split_length, num_keys=num_keys)

    def _tile(self, query_rows: int, heads_per_kv: int) -> int:
        tiles = tiles_of(head_dim=self.q.shape[2], dtype=self.q.dtype, page_dtype=self.pages.dtype)
        if self.options.split_length is not None:  # every row in the same tile, in whatever company
            return fixed_tile(heads_per_kv, tiles)
        return tile_rows(query_rows, heads_per_kv, tiles)

    def _attend(
        self, part: Partition, plan: Tensor, block: tuple[Tensor, Tensor], partials: Tensor, stats: Tensor
    ) -> None:
        options, requests = self.options, self.requests
        page_size, kv_heads, head_dim = self.pages.shape[2:]
        parts = num_parts(tile=part.tile, head_dim=head_dim)
        attention_kernel[(kv_heads * parts, part.num_items)](
            self.q,
            self.pages,
            requests.page_table,  # not read: pages are given
            *block,
            self.attended,
            partials,
            stats,
            plan,
            requests.token_offsets,
            requests.context_lens,
            requests.page_table,
            stats if options.sinks is None else options.sinks,
            head_dim**-0.5 if options.score_scale is None else options.score_scale,
            options.k_scale,
            options.v_scale,
            options.softcap or 1.0,
            part.num_requests,
            part.block_rows,
            block[0].stride(0),
            block[1].stride(0),
            requests.page_table.shape[1],
            kv_heads,
            part.heads_per_kv,
            heads_reciprocal(heads_per_kv=part.heads_per_kv),
            page_size.bit_length() - 1,
            0,
            options.max_lag,
            options.max_lead,
            options.window_step,
            part.min_rows,
            part.max_rows,
            part.num_slots,
            int(options.sinks is not None),
            **attention_constants(head_dim=head_dim),
            **part.constants,
            PAGE_RUN=page_run(page_size=page_size, key_block=part.key_block),
            HAS_SOFTCAP=options.softcap is not None,
            HAS_FULL_LOOP=has_full_loop(tile=part.tile, is_split_fixed=part.split_blocks > 0),
            FIRST_KEY=options.first_key,
            POOLED=False,
            PLANNED=True,
            PARTS=parts,
            **attention_options(tile=part.tile, head_dim=head_dim, dtype=self.q.dtype),
            enable_fp_fusion=True,
        )

    def _reduce(self, part: Partition, plan: Tensor, partials: Tensor, stats: Tensor) -> None:
        heads = (self.pages.shape[3], part.heads_per_kv)
        join_splits(self.attended, (partials, stats), plan, self.requests, part, heads, sinks=self.options.sinks)

    def _quantize(self, part: Partition, plan: Tensor, partials: Tensor, stats: Tensor) -> None:
        options, kv_heads, codes = self.options, self.pages.shape[3], self.codes
        assert codes is not None
        attention_codes_kernel[(kv_heads, part.tile_capacity, part.tile // REDUCTION_ROWS)](
            self.attended,
            partials,
            stats,
            plan,
            stats if options.sinks is None else options.sinks,
            codes.values,
            codes.scale,
            kv_heads,
            part.heads_per_kv,
            heads_reciprocal(heads_per_kv=part.heads_per_kv),
            int(options.sinks is not None),
            **attention_constants(head_dim=self.q.shape[2]),
            TILE=part.tile,
            ROWS=REDUCTION_ROWS,
            STAGES=REDUCTION_STAGES,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )

    def _partials(self, part: Partition) -> tuple[Tensor, Tensor]:
        size = workspace_size(
            tile=part.tile, kv_heads=self.pages.shape[3], head_dim=self.q.shape[2], num_slots=part.num_slots
        )
        return size.parts_of(self.workspace, hint="Make it with allocate_workspace for these heads.")


def join_splits(
    attended: Tensor,  # out, F [N, heads, D], of tiles with more than one split
    partial_results: tuple[Tensor, Tensor],  # partials, stats
    plan: Tensor,
    requests: RequestTensors,
    part: Partition,
    heads: tuple[int, int],  # K/V heads or groups, query heads of each
    *,
    sinks: Tensor | None = None,
) -> None:
    (partials, stats), (kv_heads, heads_per_kv) = partial_results, heads
    attention_reduction_kernel[(kv_heads, part.tile_capacity, part.tile // REDUCTION_ROWS)](
        attended,
        partials,
        stats,
        plan,
        requests.token_offsets,
        requests.context_lens,
        stats if sinks is None else sinks,
        part.num_requests,
        part.block_rows,
        kv_heads,
        heads_per_kv,
        heads_reciprocal(heads_per_kv=heads_per_kv),
        part.max_lag,
        part.window_step,
        part.min_rows,
        part.max_rows,
        part.num_slots,
        int(sinks is not None),
        **attention_constants(head_dim=attended.shape[2]),
        **part.constants,
        PLANNED=True,
        ROWS=REDUCTION_ROWS,
        STAGES=REDUCTION_STAGES,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
