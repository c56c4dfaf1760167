"""FP8 as hardware rounds it: Triton's interpreter loses the carry into the exponent, so that 1.99 becomes 1."""

from typing import Any

import numpy as np
import torch


def convert_exactly(convert: Any) -> Any:
    """`convert`, the interpreter's conversion of floats, with float32 to float8_e4m3fn fixed."""
    import triton.language as tl

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, rounding)
        numbers = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).reshape(values.shape).copy())
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted
