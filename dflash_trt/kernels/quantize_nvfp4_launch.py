"""How the kernel of `quantize_nvfp4.py` is launched."""

import torch
from torch import Tensor

from dflash_trt.kernels.quantize_nvfp4 import quantize_nvfp4_kernel

BLOCK = 1024


def quantize_nvfp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """F [N, in], float32 [1] -> codes uint8 [N, in / 2], block scales float8_e4m3fn [N, in / 16]; x is contiguous."""
    assert x.is_contiguous() and x.shape[1] % 16 == 0
    num_rows, num_columns = x.shape
    codes = torch.empty((num_rows, num_columns // 2), dtype=torch.uint8, device=x.device)
    block_scale = torch.empty((num_rows, num_columns // 16), dtype=torch.float8_e4m3fn, device=x.device)
    quantize_nvfp4_kernel[(num_rows, -(-num_columns // BLOCK))](
        x, scale, codes, block_scale, num_columns, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
    )
    return codes, block_scale
