"""Which requests of a step attend together, over which keys, and where the K/V of its tokens are.

Worked out once per step and page group from lengths alone, and reused by all layers of the group.
"""

import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (PyTorch's own convention)

from dflash_trt.backends.torch.fixed_shapes import KEY_TILE, QUERY_ROWS, padded_length
from dflash_trt.network.ops import StepInputs

_MAX_KEYS_PER_CALL = 2048  # with padding


@dataclass(kw_only=True, slots=True)
class QueryGroup:
    """G requests attended in one call, Q query rows each, over S keys, from position 0 or `first_keys` on."""

    # int64 [G*Q] of the step's tokens, a short request's last one repeated; None means all, in order
    rows: Tensor | None
    positions: Tensor  # int64 [G, Q]
    page_ids: Tensor  # int64 [G, P]
    num_keys: int  # S
    foreign_rows: Tensor | None = None  # int64, of the gathered [G * P * page_size]: read, but of no request
    first_keys: Tensor | None = None  # int64 [G]; None means 0
    biases: dict[tuple[int | bool | None, ...], Tensor | None] = field(default_factory=dict)
    gathers: dict[tuple[torch.dtype, torch.Size], "Gather"] = field(default_factory=dict)

    @property
    def key_positions(self) -> Tensor:
        """int64 [S], or [G, 1, S]."""
        positions = torch.arange(self.num_keys)
        return positions if self.first_keys is None else self.first_keys[:, None, None] + positions


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather destination of a group's pages, the same for all layers whose pages have one shape."""

    rows: Tensor  # int64 [2 * G * P] of the pool's [(page, k or v), ...]: first K, then V
    into: Tensor  # [2 * G * P, page_size * kv_heads * D]
    kv: tuple[Tensor, Tensor]  # views of it: [G, kv_heads, S, D]
    foreign: Tensor  # view of it: [2, G * P * page_size, kv_heads * D]


@dataclass(frozen=True, slots=True)
class PageSlots:
    """Rows of a page pool seen as [(page, k or v, offset), kv_heads, D]; int64, one per token."""

    k: Tensor
    v: Tensor


class Scratch:
    """Memory for gathered K/V, reused by every call: fresh memory would cost more than the copy."""

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
    """Destinations of the step's K/V, and the requests that attend together; positions count in a request."""

    slots: PageSlots  # for all T tokens
    groups: list[QueryGroup]
    request_of_row: Tensor  # int64 [T]
    own_groups: list[QueryGroup] | None = None  # over the positions of this rank, see `divided_context.py`
    scratch: Scratch = field(default_factory=Scratch)

    def kept_rows(self, positions: Tensor, limits: Tensor) -> tuple[Tensor, PageSlots]:
        """The rows at positions < limits [R] of their request, int64, and where they go."""
        rows = (positions < limits[self.request_of_row]).nonzero()[:, 0]
        return rows, PageSlots(self.slots.k[rows], self.slots.v[rows])


@dataclass(kw_only=True, slots=True)
class BlockPlan:
    """R blocks of S slots, each after the first `context_lens` positions of its request's pages."""

    group: QueryGroup
    context_lens: Tensor  # int64 [R]
    scratch: Scratch = field(default_factory=Scratch)


def plan_attention(
    inputs: StepInputs[Tensor],
    *,
    page_size: int,
    num_draft_tokens: int,
    has_fixed_shapes: bool = False,
    page_table: Tensor | None = None,  # int32 [R, P], of a page group; None if there is one
    window: int | None = None,
) -> AttentionPlan:
    """Compute the step's indices on the host. In a page group with a `window`, earlier pages are not read.

    With fixed shapes QUERY_ROWS rows attend as a request of their own, over a multiple of KEY_TILE keys.
    """
    offsets = inputs.token_offsets.tolist()
    num_tokens = [stop - start for start, stop in itertools.pairwise(offsets)]
    ends = [length + n for length, n in zip(inputs.context_lens.tolist(), num_tokens, strict=True)]
    pages = (inputs.page_table if page_table is None else page_table).long()
    first_keys = _first_keys(inputs.context_lens.long(), window)
    positions = inputs.positions.long()
    request_of_row = torch.repeat_interleave(torch.tensor(num_tokens))
    k_slots = pages[request_of_row, positions // page_size] * (2 * page_size) + positions % page_size
    if has_fixed_shapes:
        groups = _fixed_groups(offsets, pages, positions, page_size, first_keys)
    else:
        requests = range(len(num_tokens))
        short = [r for r in requests if num_tokens[r] <= num_draft_tokens + 1]
        members = _batches(short, ends) + [[r] for r in requests if num_tokens[r] > num_draft_tokens + 1]
        groups = [_group(group, offsets, ends, pages, positions, page_size) for group in members]
        if window is not None:
            groups = [
                _in_window(group, torch.tensor([ends[r] for r in requests]), first_keys[requests], page_size)
                for group, requests in zip(groups, members, strict=True)
            ]
    return AttentionPlan(slots=PageSlots(k_slots, k_slots + page_size), groups=groups, request_of_row=request_of_row)


def plan_blocks(
    page_table: Tensor,  # int32 [R, P]
    context_lens: Tensor,  # int32 [R]
    *,
    page_size: int,
    num_slots: int,
    scratch: Scratch | None = None,
    window: int | None = None,
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
    if window is not None:
        group = _in_window(group, starts, _first_keys(starts - 1, window), page_size)  # an anchored one begins here
    return BlockPlan(group=group, context_lens=starts, scratch=scratch or Scratch())


def _batches(requests: list[int], ends: list[int]) -> list[list[int]]:
    """Requests to attend together: of similar length, as K/V are padded, and few, to stay in the cache."""
    if len(requests) * max((ends[r] for r in requests), default=0) <= _MAX_KEYS_PER_CALL:
        return [requests] if requests else []
    batches: list[list[int]] = []
    for r in sorted(requests, key=lambda r: -ends[r]):
        if not batches or (len(batches[-1]) + 1) * ends[batches[-1][0]] > _MAX_KEYS_PER_CALL:
            batches.append([])
        batches[-1].append(r)
    return batches


def _first_keys(context_lens: Tensor, window: int | None) -> Tensor:
    """The first position that rows after `context_lens` tokens read, int64 [R]."""
    return torch.zeros_like(context_lens) if window is None else (context_lens - window + 1).clamp(min=0)


def _in_window(
    group: QueryGroup,
    ends: Tensor,  # int64 [G], of the keys
    first_keys: Tensor,  # int64 [G]
    page_size: int,
) -> QueryGroup:
    """The group over the pages from `first_keys` on, as many for each request."""
    first_pages = first_keys // page_size
    num_keys = max(int((ends - first_pages * page_size).max()), 1)
    columns = first_pages[:, None] + torch.arange(-(-num_keys // page_size))
    page_ids = group.page_ids.gather(1, columns.clamp(max=group.page_ids.shape[1] - 1))
    starts = first_pages * page_size
    return replace(
        group,
        page_ids=page_ids,
        num_keys=num_keys,
        first_keys=starts,
        foreign_rows=_foreign_rows(ends - starts, page_ids, num_keys, page_size, first_keys - starts),
    )


def _fixed_groups(
    offsets: list[int], pages: Tensor, positions: Tensor, page_size: int, first_keys: Tensor
) -> list[QueryGroup]:
    """Blocks of QUERY_ROWS rows of a request, instead of requests. Keys start at 0, so tiles are the same."""
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
            first_keys=first_keys[[starts[block][0] for block in blocks]],
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
    first_keys: Tensor | None = None,
) -> QueryGroup:
    """`width` and `num_keys` default to the needed numbers. Keys before `first_keys` are foreign."""
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
        foreign_rows=_foreign_rows(torch.tensor([ends[r] for r in group]), page_ids, num_keys, page_size, first_keys),
    )


def _foreign_rows(
    ends: Tensor,  # int [G]
    page_ids: Tensor,  # [G, P]
    num_keys: int,
    page_size: int,
    starts: Tensor | None = None,  # int [G]; None means 0
) -> Tensor | None:
    """See QueryGroup: those before `starts` and from `ends` on."""
    positions = torch.arange(page_ids.shape[1] * page_size)
    is_foreign = (positions >= ends[:, None]) & (positions < num_keys)
    if starts is not None:
        is_foreign |= positions < starts[:, None]
    rows = is_foreign.flatten().nonzero()[:, 0]
    return rows if len(rows) else None
