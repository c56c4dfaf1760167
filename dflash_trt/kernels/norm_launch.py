"""How the kernels of `norm.py` are launched, and their ahead-of-time variants. Allocates outputs only.

With a `scale`, float32 [1], the result is FP8 codes for a GEMM with that input scale, as `quantize_fp8` would make
them from the result without one.
"""

import torch
from torch import Tensor

from dflash_trt.kernels.capacity import next_power_of_2
from dflash_trt.kernels.norm import add_rms_norm_kernel, rms_norm_kernel, silu_mul_kernel

SILU_BLOCK = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, scale: Tensor | None = None) -> Tensor:
    """Over the last axis of x [..., H]; contiguous but for the distance of rows in two dimensions."""
    hidden_size = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, hidden_size)
    normed = torch.empty(x.shape, dtype=_out_dtype(x, scale), device=x.device)
    block = next_power_of_2(hidden_size)
    rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        normed,
        weight if scale is None else scale,
        eps,
        rows.stride(0),
        hidden_size,
        BLOCK=block,
        HAS_SCALE=scale is not None,
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[N, H] each -> x + residual, and its norm."""
    assert x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous()
    num_rows, hidden_size = x.shape
    total = torch.empty_like(x)
    normed = torch.empty(x.shape, dtype=_out_dtype(x, scale), device=x.device)
    block = next_power_of_2(hidden_size)
    add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        total,
        normed,
        weight if scale is None else scale,
        eps,
        hidden_size,
        BLOCK=block,
        HAS_SCALE=scale is not None,
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
    return total, normed


def silu_mul(gate_up: Tensor, *, scale: Tensor | None = None) -> Tensor:  # [N, 2F] -> [N, F]
    assert gate_up.is_contiguous()
    num_rows, ffn_size = len(gate_up), gate_up.shape[1] // 2
    gated = torch.empty((num_rows, ffn_size), dtype=_out_dtype(gate_up, scale), device=gate_up.device)
    block = min(SILU_BLOCK, next_power_of_2(ffn_size))
    silu_mul_kernel[(num_rows, -(-ffn_size // block))](
        gate_up,
        gated,
        gate_up if scale is None else scale,
        ffn_size,
        BLOCK=block,
        HAS_SCALE=scale is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return gated


def _out_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    return x.dtype if scale is None else torch.float8_e4m3fn


def norm_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
