"""How the kernel of `one_shot.py` is launched. Allocates outputs only."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.norm_launch import code_arguments, norm_warps, result_form
from dflash_trt.kernels.one_shot import one_shot_kernel
from dflash_trt.kernels.row_codes_launch import RowCodes


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerBuffers:
    """One rank's view of the memory that all ranks can read."""

    rank: int
    num_rows: int
    hidden_size: int
    dtype: torch.dtype
    buffers: Tensor  # int64 [ranks]: addresses of F [num_rows, hidden_size]
    flags: Tensor  # int64 [ranks]: addresses of int32 [2, num_rows, ranks]
    abort: Tensor  # int32 [1]; of this rank alone

    def takes(self, x: Tensor) -> bool:
        """True if the ranks' sums of x [N, H] go through these buffers: so on every rank, for all have the same N."""
        return x.dim() == 2 and x.shape[1] == self.hidden_size and len(x) <= self.num_rows and x.dtype == self.dtype


def one_shot_sum(x: Tensor, peers: PeerBuffers) -> Tensor:
    """[N, H] of each rank -> their sum."""
    total = torch.empty_like(x)
    _launch(x, peers, total=total)
    return total


def one_shot_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: PeerBuffers, *, codes: RowCodes | None = None
) -> tuple[Tensor, Tensor]:
    """[N, H] of each rank -> their sum plus the residual, and its norm, as `add_rms_norm`."""
    assert residual.shape == x.shape and residual.is_contiguous()
    total = torch.empty_like(x)
    normed = torch.empty_like(x) if codes is None else codes.values
    _launch(x, peers, total=total, norm=(residual, weight, normed, eps), codes=codes)
    return total, normed


def _launch(
    x: Tensor,
    peers: PeerBuffers,
    *,
    total: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None = None,
    codes: RowCodes | None = None,
) -> None:
    assert x.is_contiguous() and peers.takes(x)
    residual, weight, normed, eps = norm or (x, x, total, 0.0)
    num_rows, hidden_size = x.shape
    block = next_power_of_2(hidden_size)
    one_shot_kernel[(num_rows,)](
        x,
        residual,
        weight,
        total,
        normed,
        *code_arguments(codes, x),
        peers.buffers,
        peers.flags,
        peers.abort,
        peers.num_rows,
        eps,
        hidden_size,
        rank=peers.rank,
        RANKS=len(peers.buffers),
        BLOCK=block,
        HAS_NORM=norm is not None,
        RESULT=result_form(codes),
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
