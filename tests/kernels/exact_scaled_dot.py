"""`tl.dot_scaled` with E4M3 block scales (NVFP4): Triton's interpreter takes every scale for a power of two."""

from typing import Any

import numpy as np
import torch


def scales_exactly(to_float32: Any) -> Any:
    """`to_float32`, the interpreter's decoding of block scales, with that of E4M3 fixed."""
    import triton.language as tl

    def decoded(scale: Any, *compute_type: Any) -> Any:
        if scale.dtype != tl.float8e4nv:
            return to_float32(scale, *compute_type)
        bits = torch.from_numpy(np.ascontiguousarray(scale.data).view(np.uint8).copy())
        return bits.view(torch.float8_e4m3fn).float().numpy()

    return decoded
