"""How the kernel of `quantize_fp8.py` is launched."""

import torch
from torch import Tensor

from dflash_trt.kernels.quantize_fp8 import quantize_fp8_kernel

BLOCK = 2048


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:  # F, float32 [1] -> float8_e4m3fn
    """e4m3(x / scale), x contiguous and of any shape."""
    assert x.is_contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    num_blocks = -(-x.numel() // BLOCK)
    quantize_fp8_kernel[(num_blocks,)](x, scale, codes, x.numel(), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)
    return codes
