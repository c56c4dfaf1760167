from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def exact_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 as hardware rounds it: Triton's interpreter loses the carry into the exponent, so that 1.99 becomes 1."""
    if device.type == "cuda":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, rounding)
        numbers = torch.from_numpy(np.frombuffer(values.tobytes(), dtype=np.float32).reshape(values.shape).copy())
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)
