"""Rows of activations that pages keep by token position, in PyTorch."""

import torch
from torch import Tensor

from dflash_trt.network.ops import StepInputs
from dflash_trt.network.state import RowCache


def previous_rows(
    x: Tensor,  # [T, H], of the step's tokens
    inputs: StepInputs[Tensor],
    page_table: Tensor,  # int32 [R, P]
    cache: RowCache[Tensor],
) -> Tensor:
    """See `Ops.previous_rows`."""
    num_tokens = inputs.token_offsets.diff().long()
    requests = torch.arange(len(num_tokens)).repeat_interleave(num_tokens)
    before = torch.cat((x[:1], x[:-1]))
    has_tokens = num_tokens > 0
    firsts = inputs.token_offsets[:-1].long()[has_tokens]
    before[firsts] = read_rows(cache, page_table[has_tokens], inputs.context_lens[has_tokens].long() - 1)
    places = _places(cache, page_table[requests], inputs.positions.long())
    cache.tensor.view(-1, x.shape[1]).index_copy_(0, places, x)
    return before


def read_rows(
    cache: RowCache[Tensor],
    page_table: Tensor,  # int32 [R, P]
    positions: Tensor,  # int64 [R], zeros at -1
) -> Tensor:  # [R, H]
    places = _places(cache, page_table, positions.clamp(min=0))
    rows = cache.tensor.view(-1, cache.spec.width).index_select(0, places)
    return rows.masked_fill_((positions < 0)[:, None], 0)


def _places(cache: RowCache[Tensor], page_table: Tensor, positions: Tensor) -> Tensor:
    """Indices among all rows of all pages, int64 [N]."""
    page_size = cache.tensor.shape[1]
    pages = page_table.long().gather(1, (positions // page_size)[:, None])[:, 0]
    return pages * page_size + positions % page_size
