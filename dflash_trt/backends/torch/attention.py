"""Attention over pages in plain PyTorch: gather a request's pages, mask, scaled_dot_product_attention.

Requests with few query rows (verify blocks) share one padded call; each long prefill chunk gets a call of its own.
Everything that depends only on lengths is worked out once per step, in an `AttentionPlan`, and reused by all layers.

A weight of 0 does not hide NaN. Gathered rows that are not a request's own, of pages that others have or had, are
cleared: what is not finite in one request stays there.
"""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.fixed_shapes import KEY_TILE, QUERY_ROWS, padded_length
from dflash_trt.backends.torch.scores import PLAIN_SCORES, Scores, attend
from dflash_trt.core.model.gqa import AttentionMask
from dflash_trt.formats.fp8 import e4m3
from dflash_trt.network.ops import Cache, StepInputs

_MAX_KEYS_PER_CALL = 2048  # with padding


@dataclass(kw_only=True, slots=True)
class QueryGroup:
    """G requests attended in one call, Q query rows each, over S key positions starting at 0."""

    rows: Tensor | None  # int64 [G*Q] of the step's tokens, a short request's last repeated; None: all, in order
    positions: Tensor  # int64 [G, Q]
    page_ids: Tensor  # int64 [G, P]
    num_keys: int  # S
    foreign_rows: Tensor | None = None  # int64, of the gathered [G * P * page_size]: read, but of no request
    biases: dict[tuple[int | bool | None, ...], Tensor | None] = field(default_factory=dict)
    gathers: dict[tuple[torch.dtype, torch.Size], "Gather"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gather:
    """Where a group's pages are copied to, the same for all layers whose pages have one shape."""

    rows: Tensor  # int64 [2 * G * P] of the pool's [(page, k or v), ...]: those of K, then those of V
    into: Tensor  # [2 * G * P, page_size * kv_heads * D]
    kv: tuple[Tensor, Tensor]  # views of it: [G, kv_heads, S, D]
    foreign: Tensor  # view of it: [2, G * P * page_size, kv_heads * D]


@dataclass(frozen=True, slots=True)
class PageSlots:
    """Rows of a page pool seen as [(page, k or v, offset), kv_heads, D]; int64, one per token."""

    k: Tensor
    v: Tensor


class Scratch:
    """Memory for gathered K/V, used by one call after the other: fresh memory for each costs more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def take(self, like: Tensor, num_rows: int) -> Tensor:
        """[2, num_rows, like's row size], overwritten by the next call."""
        size = 2 * num_rows * like.shape[1]
        buffer = self._buffers.get(like.dtype)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[like.dtype] = like.new_empty(size)
        return buffer[:size].view(2, num_rows, like.shape[1])


@dataclass(kw_only=True, slots=True)
class AttentionPlan:
    """Where the K/V of a step's tokens go and which requests attend together; positions are those in a request."""

    slots: PageSlots  # of all T tokens
    groups: list[QueryGroup]
    request_of_row: Tensor  # int64 [T]
    scratch: Scratch = field(default_factory=Scratch)

    def kept_rows(self, positions: Tensor, limits: Tensor) -> tuple[Tensor, PageSlots]:
        """The rows at positions < limits [R] of their request, int64, and where they go."""
        rows = (positions < limits[self.request_of_row]).nonzero()[:, 0]
        return rows, PageSlots(self.slots.k[rows], self.slots.v[rows])


@dataclass(kw_only=True, slots=True)
class BlockPlan:
    """R blocks of S slots, each behind the first `context_lens` positions of its request's pages."""

    group: QueryGroup
    context_lens: Tensor  # int64 [R]
    scratch: Scratch = field(default_factory=Scratch)


def plan_attention(
    inputs: StepInputs[Tensor], *, page_size: int, num_draft_tokens: int, has_fixed_shapes: bool = False
) -> AttentionPlan:
    """Work out the step's indices on the host.

    With fixed shapes QUERY_ROWS rows attend as a request of their own, over a multiple of KEY_TILE keys.
    """
    offsets = inputs.token_offsets.tolist()
    num_tokens = [stop - start for start, stop in itertools.pairwise(offsets)]
    ends = [length + n for length, n in zip(inputs.context_lens.tolist(), num_tokens, strict=True)]
    pages = inputs.page_table.long()
    positions = inputs.positions.long()
    request_of_row = torch.repeat_interleave(torch.tensor(num_tokens))
    k_slots = pages[request_of_row, positions // page_size] * (2 * page_size) + positions % page_size
    if has_fixed_shapes:
        groups = _fixed_groups(offsets, pages, positions, page_size)
    else:
        requests = range(len(num_tokens))
        short = [r for r in requests if num_tokens[r] <= num_draft_tokens + 1]
        members = _batches(short, ends) + [[r] for r in requests if num_tokens[r] > num_draft_tokens + 1]
        groups = [_group(group, offsets, ends, pages, positions, page_size) for group in members]
    return AttentionPlan(slots=PageSlots(k_slots, k_slots + page_size), groups=groups, request_of_row=request_of_row)


def plan_blocks(
    page_table: Tensor,  # int32 [R, P]
    context_lens: Tensor,  # int32 [R]
    *,
    page_size: int,
    num_slots: int,
    scratch: Scratch | None = None,
) -> BlockPlan:
    """Blocks of `num_slots` rows per request, whose own K/V are in no page."""
    starts = context_lens.long()
    num_keys = max(int(starts.max()), 1)
    page_ids = page_table.long()[:, : -(-num_keys // page_size)]
    group = QueryGroup(
        rows=None,
        positions=starts[:, None] + torch.arange(num_slots),
        page_ids=page_ids,
        num_keys=num_keys,
        foreign_rows=_foreign_rows(starts, page_ids, num_keys, page_size),
    )
    return BlockPlan(group=group, context_lens=starts, scratch=scratch or Scratch())


def _batches(requests: list[int], ends: list[int]) -> list[list[int]]:
    """Requests to attend together: of similar length, because K/V are padded, and few, to stay in the CPU's cache."""
    if len(requests) * max((ends[r] for r in requests), default=0) <= _MAX_KEYS_PER_CALL:
        return [requests] if requests else []
    batches: list[list[int]] = []
    for r in sorted(requests, key=lambda r: -ends[r]):
        if not batches or (len(batches[-1]) + 1) * ends[batches[-1][0]] > _MAX_KEYS_PER_CALL:
            batches.append([])
        batches[-1].append(r)
    return batches


def _fixed_groups(offsets: list[int], pages: Tensor, positions: Tensor, page_size: int) -> list[QueryGroup]:
    """Blocks of QUERY_ROWS rows of a request, in the place of requests."""
    starts = [(r, row) for r in range(len(pages)) for row in range(offsets[r], offsets[r + 1], QUERY_ROWS)]
    stops = [min(row + QUERY_ROWS, offsets[r + 1]) for r, row in starts]
    ends = [position + 1 for position in positions[torch.tensor(stops) - 1].tolist()]
    num_keys = [padded_length(end, KEY_TILE) for end in ends]
    num_missing = max(0, -(-max(num_keys) // page_size) - pages.shape[1])
    own_pages = F.pad(pages, (0, num_missing))[[r for r, _ in starts]]
    return [
        _group(
            blocks,
            [row for _, row in starts] + stops[-1:],
            ends,
            own_pages,
            positions,
            page_size,
            width=QUERY_ROWS,
            num_keys=max(num_keys[block] for block in blocks),
        )
        for blocks in _batches(list(range(len(starts))), num_keys)
    ]


def _group(
    group: list[int],
    offsets: list[int],
    ends: list[int],
    pages: Tensor,
    positions: Tensor,
    page_size: int,
    *,
    width: int | None = None,
    num_keys: int | None = None,
) -> QueryGroup:
    """`width` and `num_keys`, as many as the group needs by default, may be more."""
    width = width or max(offsets[r + 1] - offsets[r] for r in group)
    num_keys = num_keys or max(ends[r] for r in group)
    rows = [min(offsets[r] + i, offsets[r + 1] - 1) for r in group for i in range(width)]
    is_everything = rows == list(range(offsets[-1]))
    rows_tensor = torch.tensor(rows)
    page_ids = pages[group][:, : -(-num_keys // page_size)]
    return QueryGroup(
        rows=None if is_everything else rows_tensor,
        positions=positions[rows_tensor].view(len(group), width),
        page_ids=page_ids,
        num_keys=num_keys,
        foreign_rows=_foreign_rows(torch.tensor([ends[r] for r in group]), page_ids, num_keys, page_size),
    )


def _foreign_rows(
    ends: Tensor,  # int [G]
    page_ids: Tensor,  # [G, P]
    num_keys: int,
    page_size: int,
) -> Tensor | None:
    """See QueryGroup."""
    positions = torch.arange(page_ids.shape[1] * page_size)
    is_foreign = (positions >= ends[:, None]) & (positions < num_keys)
    rows = is_foreign.flatten().nonzero()[:, 0]
    return rows if len(rows) else None


def write_pages(cache: Cache[Tensor], slots: PageSlots, k: Tensor, v: Tensor) -> None:
    """k, v [N, kv_heads, D] into pages [pages, 2, page_size, kv_heads, D]."""
    pages, scales = cache.tensor, cache.spec.scales
    if scales is not None:
        # Bytes, because PyTorch moves no float8 rows on a CPU. The division is in float32 whatever k and v are.
        k, v = (e4m3(x.float() / scale).view(torch.uint8) for x, scale in ((k, scales.k), (v, scales.v)))
        pages = pages.view(torch.uint8)
    flat = pages.view(-1, *pages.shape[3:])
    flat.index_copy_(0, slots.k, k)
    flat.index_copy_(0, slots.v, v)


def attend_rows(
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: Cache[Tensor],
    mask: AttentionMask,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """See `Ops.attend`, for rows that keep their K/V."""
    if k is not None and v is not None:
        write_pages(cache, plan.slots, k, v)
    num_heads, head_dim = q.shape[1:]
    out = None if plan.groups[0].rows is None else torch.empty_like(q)
    for group in plan.groups:
        num_requests, width = group.positions.shape
        queries = q if group.rows is None else q[group.rows]
        keys, values = read_pages(cache, group, q.dtype, plan.scratch)
        bias = causal_bias(group, mask, num_heads // cache.spec.num_kv_heads, q.dtype)
        attended = attend(queries.view(num_requests, width, num_heads, head_dim), keys, values, bias, scores)
        if out is None or group.rows is None:
            return attended.reshape(len(q), num_heads * head_dim)
        out[group.rows] = attended.reshape(-1, num_heads, head_dim)
    assert out is not None
    return out.view(len(q), num_heads * head_dim)


def attend_blocks(
    plan: BlockPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache[Tensor],
    mask: AttentionMask,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """See `Ops.attend`, for rows whose K/V live for this call only: over committed pages and the block itself."""
    num_requests, width = plan.group.positions.shape
    num_heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    keys, values = read_pages(cache, plan.group, q.dtype, plan.scratch)
    own_k, own_v = (x.view(num_requests, width, kv_heads, head_dim).transpose(1, 2) for x in (k, v))
    attended = attend(
        q.view(num_requests, width, num_heads, head_dim),
        torch.cat((keys, own_k), dim=2),
        torch.cat((values, own_v), dim=2),
        _block_bias(plan, mask, num_heads // kv_heads, q.dtype),
        scores,
    )
    return attended.reshape(len(q), num_heads * head_dim)


def read_pages(cache: Cache[Tensor], group: QueryGroup, dtype: torch.dtype, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """K and V of the group's requests, each [G, kv_heads, S, D]; rows past a request's end are 0.

    They are there until the next call.
    """
    scales = cache.spec.scales
    if scales is None:
        return _gathered(cache.tensor, group, scratch)
    k, v = _gathered(cache.tensor.view(torch.uint8), group, scratch)
    return k.view(torch.float8_e4m3fn).to(dtype) * scales.k, v.view(torch.float8_e4m3fn).to(dtype) * scales.v


def _gathered(pages: Tensor, group: QueryGroup, scratch: Scratch) -> tuple[Tensor, Tensor]:
    key = (pages.dtype, pages.shape[2:])
    gather = group.gathers.get(key)
    if gather is None:
        gather = group.gathers[key] = _gather(pages, group, scratch)
    torch.index_select(pages.view(-1, gather.into.shape[1]), 0, gather.rows, out=gather.into)
    if group.foreign_rows is not None:
        gather.foreign.index_fill_(1, group.foreign_rows, 0)
    return gather.kv


def _gather(pages: Tensor, group: QueryGroup, scratch: Scratch) -> Gather:
    num_requests, num_pages = group.page_ids.shape
    _, _, page_size, kv_heads, head_dim = pages.shape
    k_rows = group.page_ids.reshape(-1) * 2
    into = scratch.take(pages.view(-1, page_size * kv_heads * head_dim), len(k_rows))
    k, v = into.view(2, num_requests, num_pages * page_size, kv_heads, head_dim)[:, :, : group.num_keys].transpose(2, 3)
    return Gather(
        rows=torch.cat((k_rows, k_rows + 1)),
        into=into.view(2 * len(k_rows), -1),
        kv=(k, v),
        foreign=into.view(2, -1, kv_heads * head_dim),
    )


def causal_bias(group: QueryGroup, mask: AttentionMask, heads_per_kv: int, dtype: torch.dtype) -> Tensor | None:
    """None when nothing needs hiding: one request, one query, no window or chunk."""
    assert (
        mask.is_causal and not mask.is_window_anchored and not mask.first_key
    )  # targets are; other configs are refused
    key = _bias_key(mask, heads_per_kv)
    if key not in group.biases:
        num_requests, width = group.positions.shape
        if num_requests == 1 and width == 1 and mask.window is None and mask.chunk is None:
            group.biases[key] = None
        else:
            query = group.positions[:, :, None]
            key_positions = torch.arange(group.num_keys)
            visible = key_positions <= query
            if mask.window is not None:
                visible &= query - key_positions < mask.window
            if mask.chunk is not None:
                visible &= query // mask.chunk == key_positions // mask.chunk
            group.biases[key] = _additive(visible, heads_per_kv, dtype)
    return group.biases[key]


def _bias_key(mask: AttentionMask, heads_per_kv: int) -> tuple[int | bool | None, ...]:
    """The mask's fields, whose hash costs a tenth of the model's own."""
    return mask.window, mask.chunk, mask.is_causal, mask.is_window_anchored, mask.first_key, heads_per_kv


def _block_bias(plan: BlockPlan, mask: AttentionMask, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """Context rows below the context length, then the block; the window is counted in true positions.

    An anchored window starts that many positions before the block, whichever slot asks, and covers all of the block.
    """
    group, key = plan.group, _bias_key(mask, heads_per_kv)
    if (known := group.biases.get(key)) is not None:
        return known
    num_requests, width = group.positions.shape
    context_lens = plan.context_lens[:, None, None]  # [R, 1, 1]
    query = group.positions[:, :, None]  # [R, S, 1]
    stored = torch.arange(group.num_keys).expand(num_requests, 1, -1)
    key_positions = torch.cat((stored, group.positions[:, None]), dim=2)  # [R, 1, keys + S]
    is_stored = torch.arange(group.num_keys + width) < group.num_keys
    visible = ~is_stored | ((key_positions < context_lens) & (key_positions >= mask.first_key))
    distance = query - key_positions
    if mask.is_causal:
        visible = visible & (distance >= 0)
    if mask.window is not None and mask.is_window_anchored:
        visible = visible & (key_positions >= context_lens - mask.window)
    elif mask.window is not None:
        visible = visible & (distance < mask.window) & (-distance < mask.window)
    bias = group.biases[key] = _additive(visible.expand(num_requests, width, -1), heads_per_kv, dtype)
    return bias


def _additive(visible: Tensor, heads_per_kv: int, dtype: torch.dtype) -> Tensor:
    """[G, Q, S] bool -> [G, 1, heads_per_kv * Q, S] of 0 and -inf."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask.repeat(1, heads_per_kv, 1)[:, None]
