"""How the kernel of `head_product.py` is launched."""

from typing import Final

import torch
from torch import Tensor

from dflash_trt.kernels.head_product import head_product_kernel
from dflash_trt.kernels.launching import FLOATS, check, check_tensor

TOKENS: Final = 64
OUT: Final = 64
BLOCK_IN: Final = 64
FLOAT32_BLOCK: Final = 16  # of each, so that three products of TF32 stay in registers
NUM_WARPS: Final = 4
NUM_STAGES: Final = 2


def head_product(
    x: Tensor,  # F [N, heads, in], contiguous
    factor: Tensor,  # F [heads, in, out], or [heads, out, in] with is_transposed; heads may be further apart
    out: Tensor,  # out, F [N, heads, out]; heads may be further apart, rows are their heads
    *,
    is_transposed: bool = False,
) -> None:
    """out[n, h] = x[n, h] @ factor[h]; the bits of a row depend on the row alone, whatever N is."""
    num_rows, heads, in_size = x.shape
    out_size = out.shape[2]
    check_tensor("x", x, dtype=FLOATS, shape=[None, None, None])
    sizes = [heads, out_size, in_size] if is_transposed else [heads, in_size, out_size]
    for name, tensor, shape in (("factor", factor, sizes), ("out", out, [num_rows, heads, out_size])):
        is_right = list(tensor.shape) == shape and tensor.dtype == x.dtype
        expected, found = f"{x.dtype} {shape}", f"{tensor.dtype} {list(tensor.shape)}"
        check(is_right, name, expected=expected, found=found, hint="As x has them.")
    is_dense = factor.stride()[1:] == (factor.shape[2], 1) and out.stride()[::2] == (heads * out.stride(1), 1)
    found = f"strides {factor.stride()} and {out.stride()}"
    check(is_dense, "factor and out", expected="dense rows", found=found, hint="Heads alone may be further apart.")
    constants = head_product_constants(in_size, out_size, dtype=x.dtype, is_transposed=is_transposed)
    head_product_kernel[(-(-num_rows // constants["TOKENS"]), -(-out_size // constants["OUT"]), heads)](
        x,
        factor,
        out,
        num_rows,
        heads,
        factor.stride(0),
        out.stride(1),
        **constants,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )


def head_product_constants(
    in_size: int, out_size: int, *, dtype: torch.dtype, is_transposed: bool
) -> dict[str, int | bool]:
    tokens, out, block_in = (FLOAT32_BLOCK,) * 3 if dtype == torch.float32 else (TOKENS, OUT, BLOCK_IN)
    return {
        "IN": in_size,
        "OUT_SIZE": out_size,
        "IS_TRANSPOSED": is_transposed,
        "TOKENS": tokens,
        "OUT": out,
        "BLOCK_IN": block_in,
    }
