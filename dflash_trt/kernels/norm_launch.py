"""How the kernels of `norm.py` are launched, and their ahead-of-time variants. Allocates outputs only.

With a `scale`, float32 [1], the result is FP8 codes for a GEMM with that input scale, as `quantize_fp8` would make
them from the result without one.
"""

import torch
from torch import Tensor

from dflash_trt.kernels.norm import add_rms_norm_kernel, rms_norm_kernel, silu_mul_kernel
from dflash_trt.kernels.variant import KernelVariant, next_power_of_2, pointer

_SILU_BLOCK = 2048


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
        num_warps=_num_warps(block),
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
        num_warps=_num_warps(block),
        enable_fp_fusion=True,
    )
    return total, normed


def silu_mul(gate_up: Tensor, *, scale: Tensor | None = None) -> Tensor:  # [N, 2F] -> [N, F]
    assert gate_up.is_contiguous()
    num_rows, ffn_size = len(gate_up), gate_up.shape[1] // 2
    gated = torch.empty((num_rows, ffn_size), dtype=_out_dtype(gate_up, scale), device=gate_up.device)
    block = min(_SILU_BLOCK, next_power_of_2(ffn_size))
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


def norm_variants(dtype: torch.dtype, *, hidden_size: int, ffn_size: int, has_scale: bool) -> tuple[KernelVariant, ...]:
    """Grids use num_rows, the rows of the kernel's output. `has_scale`: with FP8 codes as results."""
    tensor, result = pointer(dtype), pointer(torch.float8_e4m3fn if has_scale else dtype)
    scale = pointer(torch.float32) if has_scale else tensor  # not read: any tensor stands in
    block, silu_block = next_power_of_2(hidden_size), min(_SILU_BLOCK, next_power_of_2(ffn_size))
    hidden, ffn = (f"i32{':16' if size % 16 == 0 else ''}" for size in (hidden_size, ffn_size))
    suffix = "_fp8" if has_scale else ""
    tensors = {"x": tensor, "weight": tensor, "normed": result, "scale": scale, "eps": "fp32"}
    sums = {"x": tensor, "residual": tensor, "weight": tensor, "total": tensor, "normed": result, "scale": scale}
    return (
        KernelVariant(
            name=f"rms_norm{suffix}",
            kernel=rms_norm_kernel,
            signature=tensors | {"x_stride": hidden, "hidden_size": hidden},
            constexprs={"BLOCK": block, "HAS_SCALE": has_scale},
            num_warps=_num_warps(block),
            num_stages=1,
            grid=("num_rows", "1", "1"),
        ),
        KernelVariant(
            name=f"add_rms_norm{suffix}",
            kernel=add_rms_norm_kernel,
            signature=sums | {"eps": "fp32", "hidden_size": hidden},
            constexprs={"BLOCK": block, "HAS_SCALE": has_scale},
            num_warps=_num_warps(block),
            num_stages=1,
            grid=("num_rows", "1", "1"),
        ),
        KernelVariant(
            name=f"silu_mul{suffix}",
            kernel=silu_mul_kernel,
            signature={"gate_up": tensor, "gated": result, "scale": scale, "ffn_size": ffn},
            constexprs={"BLOCK": silu_block, "HAS_SCALE": has_scale},
            num_warps=4,
            num_stages=1,
            grid=("num_rows", f"(ffn_size + {silu_block - 1}) / {silu_block}", "1"),
        ),
    )


def _out_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    return x.dtype if scale is None else torch.float8_e4m3fn


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
