"""Rows of tokens as the attention kernels read them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dflash_trt.kernels.attention_fixed import Piece
from dflash_trt.kernels.attention_plan import RequestTensors
from dflash_trt.network.ops import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsIndex:
    """Requests of some rows with their pages of one group, and the pieces in which they are attended."""

    requests: RequestTensors
    pieces: tuple[Piece, ...]


def rows_of(
    positions: Tensor,
    token_offsets: Tensor,
    context_lens: Tensor,
    page_table: Tensor,  # int32 [G, R, P], each group's at an aligned address
    *,
    keeps_kv: bool,
) -> Rows[Any]:
    """The offsets of blocks are read by no kernel; the step's are there in their place."""
    tables = page_table.view(-1, len(context_lens), page_table.shape[-1])
    requests = [RequestTensors(token_offsets=token_offsets, context_lens=context_lens, page_table=t) for t in tables]
    whole = slice(len(positions))
    return Rows(
        positions=positions,
        token_offsets=token_offsets if keeps_kv else None,
        context_lens=context_lens,
        page_table=page_table,
        keeps_kv=keeps_kv,
        index=tuple(RowsIndex(requests=group, pieces=(Piece(rows=whole, requests=group),)) for group in requests),
    )
