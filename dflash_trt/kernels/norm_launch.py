"""How the kernels of `norm.py` are launched, and their ahead-of-time variants. Allocates outputs only.

With `codes` the result is written there, as `quantize_rows` would make them from the result without, and only there.
"""

import torch
from torch import Tensor

from dflash_trt.kernels.launching import next_power_of_2
from dflash_trt.kernels.norm import add_rms_norm_kernel, gated_mul_kernel, rms_norm_kernel, sigmoid_mul_kernel
from dflash_trt.kernels.row_codes import AS_THEY_ARE
from dflash_trt.kernels.row_codes_launch import RowCodes

GATED_BLOCK = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, codes: RowCodes | None = None) -> Tensor:
    """Over the last axis of x [..., H]; contiguous but for the distance of rows in two dimensions."""
    hidden_size = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, hidden_size)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if codes is None else codes.values
    block = next_power_of_2(hidden_size)
    rms_norm_kernel[(len(rows),)](
        rows,
        weight,
        normed,
        *code_arguments(codes, weight),
        eps,
        rows.stride(0),
        hidden_size,
        BLOCK=block,
        RESULT=result_form(codes),
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, codes: RowCodes | None = None
) -> tuple[Tensor, Tensor]:
    """[N, H] each -> x + residual, and its norm."""
    assert x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous()
    num_rows, hidden_size = x.shape
    total = torch.empty_like(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device) if codes is None else codes.values
    block = next_power_of_2(hidden_size)
    add_rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        total,
        normed,
        *code_arguments(codes, weight),
        eps,
        hidden_size,
        BLOCK=block,
        RESULT=result_form(codes),
        num_warps=norm_warps(block),
        enable_fp_fusion=True,
    )
    return total, normed


def silu_mul(gate_up: Tensor, *, codes: RowCodes | None = None) -> Tensor:  # [N, 2F] -> [N, F]
    return _gated_mul(gate_up, codes, is_gelu=False)


def gelu_mul(gate_up: Tensor, *, codes: RowCodes | None = None) -> Tensor:  # [N, 2F] -> [N, F]
    """In GELU's approximation with tanh."""
    return _gated_mul(gate_up, codes, is_gelu=True)


def _gated_mul(gate_up: Tensor, codes: RowCodes | None, *, is_gelu: bool) -> Tensor:
    assert gate_up.is_contiguous()
    num_rows, ffn_size = len(gate_up), gate_up.shape[1] // 2
    gated = gate_up.new_empty((num_rows, ffn_size)) if codes is None else codes.values
    block = min(GATED_BLOCK, next_power_of_2(ffn_size))
    gated_mul_kernel[(num_rows, -(-ffn_size // block))](
        gate_up,
        gated,
        *code_arguments(codes, gate_up),
        ffn_size,
        BLOCK=block,
        RESULT=result_form(codes),
        IS_GELU=is_gelu,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return gated


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate): x [N, F], and gate [N, F] or [N, 1], contiguous both."""
    num_rows, num_columns = x.shape
    assert x.is_contiguous() and gate.is_contiguous() and gate.shape in {x.shape, (num_rows, 1)}
    gated = torch.empty_like(x)
    block = min(GATED_BLOCK, next_power_of_2(num_columns))
    sigmoid_mul_kernel[(num_rows, -(-num_columns // block))](
        x,
        gate,
        gated,
        num_columns,
        BLOCK=block,
        IS_SCALAR=gate.shape[1] == 1 and num_columns > 1,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return gated


def code_arguments(codes: RowCodes | None, stand_in: Tensor) -> tuple[Tensor, Tensor]:
    """`block_scale` and `scale` of a kernel; any tensor stands in for one that is not used."""
    return (stand_in, stand_in) if codes is None else (codes.block_scale_argument, codes.scale)


def result_form(codes: RowCodes | None) -> int:
    return AS_THEY_ARE if codes is None else codes.form


def norm_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
