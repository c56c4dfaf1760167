"""How the kernel of `quantize_fp8.py` is launched, and its ahead-of-time variant."""

import torch
from torch import Tensor

from dflash_trt.kernels.quantize_fp8 import quantize_fp8_kernel
from dflash_trt.kernels.variant import KernelVariant, pointer

BLOCK = 2048


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:  # F, float32 [1] -> float8_e4m3fn
    """e4m3(x / scale), x contiguous and of any shape."""
    assert x.is_contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    num_blocks = -(-x.numel() // BLOCK)
    quantize_fp8_kernel[(num_blocks,)](x, scale, codes, x.numel(), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)
    return codes


def quantize_variant(dtype: torch.dtype) -> KernelVariant:
    """The grid uses num_elements."""
    signature = {
        "x": pointer(dtype),
        "scale": pointer(torch.float32),
        "codes": pointer(torch.float8_e4m3fn),
        "num_elements": "i32:16",  # an FP8 GEMM has columns in multiples of 16
    }
    return KernelVariant(
        name="quantize_fp8",
        kernel=quantize_fp8_kernel,
        signature=signature,
        constexprs={"BLOCK": BLOCK},
        num_warps=4,
        num_stages=1,
        grid=(f"(num_elements + {BLOCK - 1}) / {BLOCK}", "1", "1"),
    )
